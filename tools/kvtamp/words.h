// Small work on words.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace kvtamp::tool {

// ASCII letters alone.
inline std::string Lower(std::string text) {
  for (char& c : text) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return text;
}

// The parts between separators, of which each char is one; empty parts too.
inline std::vector<std::string> Split(std::string_view text, std::string_view separators) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (separators.find(c) != separators.npos)
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

// As a shell must be given it.
inline std::string ShellQuoted(const std::string& text) {
  if (text.find_first_not_of(
          "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_+-./:,@") == text.npos) {
    return text;
  }
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace kvtamp::tool
