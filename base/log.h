// The library's only way to say something: a callback that the outermost layer installs.
#pragma once

#include <string>

namespace kvtamp {

enum class LogLevel : unsigned char { kDebug, kInfo, kWarn, kError };

using LogCallback = void (*)(LogLevel level, const char* line, void* user);

// Not thread-safe against concurrent Log(); install before use. Null silences.
void SetLogCallback(LogCallback callback, void* user);
void Log(LogLevel level, const std::string& line);

}  // namespace kvtamp
