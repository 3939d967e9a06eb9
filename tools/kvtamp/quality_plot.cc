// The plot of a QualityTable: KL divergence (logarithmic) over bits per element.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tools/kvtamp/quality_table.h"

namespace kvtamp::tool {
namespace {

constexpr double kWidth = 760, kHeight = 480, kLeft = 80, kRight = 24, kTop = 48, kBottom = 56;

std::string Escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else if (c == '>')
      out += "&gt;";
    else
      out += c;
  }
  return out;
}

// Data to picture.
struct Frame {
  double bits_lo, bits_hi, log_lo, log_hi;
  double x(double bits) const {
    return kLeft + (bits - bits_lo) / (bits_hi - bits_lo) * (kWidth - kLeft - kRight);
  }
  double y(double kld) const {
    const double at = (std::log10(kld) - log_lo) / (log_hi - log_lo);
    return kHeight - kBottom - at * (kHeight - kTop - kBottom);
  }
};

Frame FrameOf(const QualityTable& t) {
  Frame f{1e9, 0, 1e9, -1e9};
  for (const QualityRow& r : t.rows) {
    f.bits_lo = std::min(f.bits_lo, r.bits_long);
    f.bits_hi = std::max(f.bits_hi, r.bits_long);
    const double l = std::log10(std::max(r.total.kld_mean, 1e-9));
    f.log_lo = std::min(f.log_lo, l);
    f.log_hi = std::max(f.log_hi, l);
  }
  f.bits_lo = std::floor(f.bits_lo);
  f.bits_hi = std::max(std::ceil(f.bits_hi), f.bits_lo + 1);
  f.log_lo = std::floor(f.log_lo);
  f.log_hi = std::max(std::ceil(f.log_hi), f.log_lo + 1);
  return f;
}

std::string Axes(const Frame& f) {
  std::string out;
  const double right = kWidth - kRight, bottom = kHeight - kBottom;
  for (double b = f.bits_lo; b <= f.bits_hi; b += 1) {
    out += fmt::format(
        "<path d=\"M{0:.1f} {1:.1f}V{2:.1f}\" class=\"grid\"/><text x=\"{0:.1f}\" y=\"{3:.1f}\" "
        "class=\"tick\" text-anchor=\"middle\">{4:.0f}</text>\n",
        f.x(b), kTop, bottom, bottom + 18, b);
  }
  for (double l = f.log_lo; l <= f.log_hi; l += 1) {
    out += fmt::format(
        "<path d=\"M{0:.1f} {1:.1f}H{2:.1f}\" class=\"grid\"/><text x=\"{3:.1f}\" y=\"{4:.1f}\" "
        "class=\"tick\" text-anchor=\"end\">{5:g}</text>\n",
        kLeft, f.y(std::pow(10, l)), right, kLeft - 8, f.y(std::pow(10, l)) + 4, std::pow(10, l));
  }
  out += fmt::format(
      "<text x=\"{:.0f}\" y=\"{:.0f}\" text-anchor=\"middle\">stored bits per element, all "
      "overhead "
      "counted</text>\n",
      (kLeft + right) / 2, kHeight - 14);
  out += fmt::format(
      "<text transform=\"translate(18 {:.0f}) rotate(-90)\" text-anchor=\"middle\">mean KL "
      "divergence to the f16 cache</text>\n",
      (kTop + bottom) / 2);
  return out;
}

}  // namespace

std::string QualitySvg(const QualityTable& t) {
  std::string out = fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0:.0f} {1:.0f}\" "
      "font-family=\"sans-serif\" font-size=\"13\">\n<style>.grid{{stroke:#ddd}}.tick{{fill:#555;"
      "font-size:11px}}.front{{fill:none;stroke:#0a7d4f;stroke-width:1.5}}.own{{fill:#0a7d4f}}"
      ".host{{fill:#fff;stroke:#b3401a;stroke-width:2}}.floor{{stroke:#888;stroke-dasharray:4 3}}"
      "</style>\n<rect width=\"{0:.0f}\" height=\"{1:.0f}\" fill=\"#fff\"/>\n<text x=\"{2:.0f}\" "
      "y=\"24\" font-weight=\"bold\">{3}: {4} chunks of {5}, micro-batch {6}{7}</text>\n",
      kWidth, kHeight, kLeft, Escaped(t.model), t.n_chunks, t.n_ctx, t.n_ubatch,
      t.decode_only ? ", token by token" : "");
  if (t.rows.empty()) return out + "</svg>\n";
  const Frame f = FrameOf(t);
  out += Axes(f);
  if (t.kld_floor > 0 && std::log10(t.kld_floor) > f.log_lo) {
    out += fmt::format(
        "<path d=\"M{0:.1f} {1:.1f}H{2:.1f}\" class=\"floor\"/><text x=\"{2:.1f}\" y=\"{3:.1f}\" "
        "class=\"tick\" text-anchor=\"end\">noise floor</text>\n",
        kLeft, f.y(t.kld_floor), kWidth - kRight, f.y(t.kld_floor) - 4);
  }
  std::string front;
  for (const QualityRow& r : t.rows) {
    if (!r.pareto) continue;
    front += fmt::format("{}{:.1f} {:.1f}", front.empty() ? "M" : "L", f.x(r.bits_long),
                         f.y(std::max(r.total.kld_mean, 1e-9)));
  }
  out += fmt::format("<path d=\"{}\" class=\"front\"/>\n", front);
  for (const QualityRow& r : t.rows) {
    const double x = f.x(r.bits_long), y = f.y(std::max(r.total.kld_mean, 1e-9));
    // Ours are discs, the host's squares: told apart without colour.
    out += r.device == "host"
               ? fmt::format(
                     "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"9\" height=\"9\" class=\"host\">",
                     x - 4.5, y - 4.5)
               : fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"5\" class=\"own\">", x, y);
    const std::string label = (r.device == "host" ? "host " : "") + r.name;
    out += fmt::format("<title>{}{}: {:.2f} bits, KLD {:.5f}, PPL {:+.2f} %</title></{}>",
                       Escaped(label), Escaped(r.settings.empty() ? "" : " " + r.settings),
                       r.bits_long, r.total.kld_mean, 100 * (r.total.ppl_ratio - 1),
                       r.device == "host" ? "rect" : "circle");
    const bool left = x > kWidth - 140;
    out += fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n",
                       x + (left ? -9 : 9), y - 6, left ? "end" : "start", Escaped(label));
  }
  return out + "</svg>\n";
}

}  // namespace kvtamp::tool
