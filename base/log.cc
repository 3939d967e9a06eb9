#include "base/log.h"

namespace kvtamp {
namespace {
LogCallback g_callback = nullptr;
void* g_user = nullptr;
}  // namespace

void SetLogCallback(LogCallback callback, void* user) {
  g_callback = callback;
  g_user = user;
}

void Log(LogLevel level, const std::string& line) {
  if (g_callback != nullptr) g_callback(level, line.c_str(), g_user);
}

}  // namespace kvtamp
