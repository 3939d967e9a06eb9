// From the times of one line of bench/attention to its figures, and the table of all lines. Pure.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "bench/shape.h"

namespace kvtamp::bench {

struct Line {
  std::string cache;  // "kvtamp k4v4" or "ggml q8_0"
  std::string isa;
  Shape shape;
  int n_threads = 1;
  std::size_t layer_bytes = 0;  // of K and V as stored
};

// What was measured in turns, [repetition].
struct Turns {
  std::vector<double> seconds, peer_seconds;  // of one layer; the peer is ggml's f16
  std::vector<double> read;                   // bytes per second
};

struct Figures {
  double seconds = 0;  // of one layer, median
  double coded_rate = 0, read_rate = 0, share = 0;
  double flop_rate = 0;
  // How many times as fast as ggml's f16: of the same turns, median, least and most.
  double ratio = 0, ratio_min = 0, ratio_max = 0;
};

// At least one turn.
Figures FiguresOf(const Line& line, const Turns& turns);

struct Row {
  Line line;
  Figures figures;
};
std::string Markdown(std::span<const Row> rows);

}  // namespace kvtamp::bench
