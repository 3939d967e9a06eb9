#include "bench/results.h"

#include <fmt/format.h>

#include <algorithm>

#include "tools/kvtamp/speed_table.h"

namespace kvtamp::bench {

Figures FiguresOf(const Line& line, const Turns& turns) {
  Figures f;
  f.seconds = tool::Median(turns.seconds);
  f.coded_rate = static_cast<double>(line.layer_bytes) / f.seconds;
  f.read_rate = *std::max_element(turns.read.begin(), turns.read.end());
  f.share = f.coded_rate / f.read_rate;
  f.flop_rate = Flops(line.shape) / f.seconds;
  std::vector<double> ratios;
  for (std::size_t i = 0; i < turns.seconds.size(); ++i)
    ratios.push_back(turns.peer_seconds[i] / turns.seconds[i]);
  const auto [least, most] = std::minmax_element(ratios.begin(), ratios.end());
  f.ratio = tool::Median(ratios);
  f.ratio_min = *least;
  f.ratio_max = *most;
  return f;
}

std::string Markdown(std::span<const Row> rows) {
  std::string out =
      "| test | tokens stored | heads | cache | ISA | threads | KiB/layer | ms/layer | GB/s "
      "| of read GB/s | GFLOP/s | of ggml f16 | min … max |\n"
      "| --- | ---: | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n";
  for (const Row& r : rows) {
    const Shape& s = r.line.shape;
    const Figures& f = r.figures;
    const std::string test = s.decode() ? "decode" : fmt::format("prefill {}", s.n_tok);
    out += fmt::format(
        "| {} | {} | {} | {} | {} | {} | {} | {:.4g} | {:.2f} | {:.0f} % of {:.1f} | {:.1f} "
        "| {:.2f} | {:.2f} … {:.2f} |\n",
        test, s.length, ShapeText(s), r.line.cache, r.line.isa, r.line.n_threads,
        r.line.layer_bytes >> 10, 1e3 * f.seconds, 1e-9 * f.coded_rate, 100 * f.share,
        1e-9 * f.read_rate, 1e-9 * f.flop_rate, f.ratio, f.ratio_min, f.ratio_max);
  }
  return out;
}

}  // namespace kvtamp::bench
