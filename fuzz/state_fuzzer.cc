// A sequence of calls on a store::Cache, decoded from the input, beside a plain map of rows.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "fuzz/bytes.h"
#include "fuzz/random.h"
#include "store/cache.h"

namespace kvtamp::fuzz {
namespace {

using codec::Side;

constexpr std::uint32_t kLayer = 3;
constexpr half_t kShut = 0xFC00;

// What a type may lose, as squared error over squared length of a row: nothing, but for the halves
// that turned keys are rounded to; the codecs' own loss with room for rows that are coded again and
// again, by shifts and compaction.
struct Type {
  const char* name;
  double k, v;
};
constexpr Type kTypes[] = {{"f16", 1e-5, 0}, {"k8v8", 5e-3, 5e-3}, {"k4v4", 0.5, 0.5}};

// A row of one side as it was written, and by how many positions it has been shifted since.
struct Row {
  std::vector<half_t> data;
  std::int32_t shift = 0;
};

class Machine {
 public:
  explicit Machine(Bytes& in) : in_(in), type_(kTypes[in.Below(3)]) {
    heads_ = 1 + in.Below(3);
    dim_ = 32 + 8 * in.Below(5);
    n_embd_ = heads_ * dim_;
    streams_ = 1 + in.Below(3);
    cells_ = 64 + in.Below(4) * 64;
    turn_ = {in.Flag() ? 8u : 0u, 8u, in.Flag()};
    store::Options options;
    options.page_size = 16u << in.Below(4);
    options.n_sink = in.Below(8);
    options.residual_length = in.Below(3) * 20;
    cache_ = std::make_unique<store::Cache>(options, streams_, cells_);
    Must(cache_->AddLayer(kLayer, n_embd_, n_embd_, codec::ParsePair(type_.name).value()));
    if (in.Flag()) Heads();
    for (auto& side : rows_) side.resize(streams_);
  }

  void Step() {
    switch (in_.Below(14)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return Write(true, true);
      case 4:
        return Write(true, false);
      case 5:
        return Write(false, true);
      case 6:
      case 7:
        return Must(cache_->Maintain(kLayer, executor_));
      case 8:
        return Attend();
      case 9:
        return Shift();
      case 10:
        return Copy();
      case 11:
        return Sinks();
      case 12:
        return in_.Below(4) == 0 ? Clear() : Heads();
      default:
        return CheckRows();
    }
  }

  void CheckRows() {
    std::vector<half_t> row(n_embd_);
    for (const Side side : {Side::kK, Side::kV}) {
      for (std::uint32_t s = 0; s < streams_; ++s) {
        for (std::uint32_t c = 0; c < cells_; ++c) {
          const bool has = cache_->Read(kLayer, side, std::uint64_t{s} * cells_ + c, row.data());
          const auto found = Of(side)[s].find(c);
          if (found == Of(side)[s].end()) {
            // A lone side that is copied over another leaves rows of nought behind, which are coded
            // like any other.
            CheckRow(side, row, {std::vector<half_t>(n_embd_, 0), 0});
            continue;
          }
          Require(has, "a row is lost");
          CheckRow(side, row, found->second);
        }
      }
    }
  }

 private:
  using Rows = std::map<std::uint32_t, Row>;

  static void Must(const Status& s) { Require(s.ok(), s.message().c_str()); }
  std::vector<Rows>& Of(Side side) { return rows_[side == Side::kK ? 0 : 1]; }

  void Heads() {
    Must(cache_->SetHeads(kLayer, heads_));
    heads_known_ = true;
  }

  // The row as the model means it now.
  std::vector<double> Turned(const Row& row) const {
    std::vector<double> x(n_embd_);
    for (std::uint32_t i = 0; i < n_embd_; ++i) x[i] = HalfToFloat(row.data[i]);
    if (row.shift == 0) return x;
    const std::uint32_t step = turn_.neox ? 1 : 2, apart = turn_.neox ? turn_.pairs : 1;
    for (std::uint32_t h = 0; h < heads_; ++h) {
      for (std::uint32_t i = 0; i < turn_.pairs; ++i) {
        double& a = x[h * dim_ + turn_.first + i * step];
        double& b = x[h * dim_ + turn_.first + i * step + apart];
        const double angle = Angle(row.shift, i), ca = std::cos(angle), sa = std::sin(angle);
        const double a0 = a;
        a = ca * a0 - sa * b;
        b = sa * a0 + ca * b;
      }
    }
    return x;
  }
  static double Angle(std::int32_t shift, std::uint32_t pair) {
    return shift * std::pow(10.0, -0.3 * pair);
  }

  void CheckRow(Side side, const std::vector<half_t>& got, const Row& want) const {
    if (type_.k == kTypes[0].k && want.shift == 0 && !shifted_) {
      Require(std::equal(got.begin(), got.end(), want.data.begin(), want.data.end(),
                         [](half_t a, half_t b) { return a == b || ((a | b) & 0x7FFF) == 0; }),
              "an f16 row is not what was written");
      return;
    }
    const std::vector<double> x = Turned(want);
    double error = 0, length = 0;
    for (std::uint32_t i = 0; i < n_embd_; ++i) {
      const double d = HalfToFloat(got[i]) - x[i];
      error += d * d;
      length += x[i] * x[i];
    }
    const double bound = side == Side::kK ? type_.k : std::max(type_.v, 1e-12);
    // A code's error goes by the range of its page, whose rows are about n_embd long.
    if (type_.v != 0) length = std::max<double>(length, n_embd_);
    Require(error <= bound * length, "a row is further from what was written than its type allows");
  }

  void Write(bool k, bool v) {
    const std::uint32_t stream = in_.Below(streams_), n = 1 + in_.Below(40);
    const std::uint32_t first = in_.Below(cells_), stride = 1 + in_.Below(3);
    Random r(in_.U16());
    std::vector<std::uint64_t> cells(n);
    for (std::uint32_t i = 0; i < n; ++i)
      cells[i] = std::uint64_t{stream} * cells_ + (first + i * stride) % cells_;
    for (const Side side : {Side::kK, Side::kV}) {
      if (side == Side::kK ? !k : !v) continue;
      std::vector<half_t> rows(std::size_t{n} * n_embd_);
      for (half_t& h : rows) h = FloatToHalf(r.Normal());
      if (r.Chance(0.5)) {
        Must(cache_->Write(kLayer, side, cells, rows.data(), n_embd_));
      } else {
        std::vector<float> wide(rows.size());
        std::transform(rows.begin(), rows.end(), wide.begin(), HalfToFloat);
        Must(cache_->Write(kLayer, side, cells, wide.data(), n_embd_));
      }
      for (std::uint32_t i = 0; i < n; ++i) {
        const auto* row = rows.data() + std::size_t{i} * n_embd_;
        Of(side)[stream][static_cast<std::uint32_t>(cells[i] % cells_)] = {{row, row + n_embd_}, 0};
      }
    }
  }

  void Shift() {
    if (!heads_known_) return;
    std::vector<std::int32_t> delta(std::size_t{cells_} * streams_, 0);
    const std::uint32_t stream = in_.Below(streams_), first = in_.Below(cells_);
    const std::uint32_t end = std::min(cells_, first + 1 + in_.Below(cells_));
    const std::int32_t by = static_cast<std::int32_t>(in_.Below(64)) - 32;
    const bool ragged = in_.Below(4) == 0;  // as after seq_div: every cell its own way
    for (std::uint32_t c = first; c < end; ++c)
      delta[std::size_t{stream} * cells_ + c] = by + (ragged ? static_cast<int>(c % 7) : 0);
    const auto angles = [&](std::int32_t shift, std::span<float> cos_sin) {
      for (std::uint32_t i = 0; i < turn_.pairs; ++i) {
        cos_sin[2 * i] = static_cast<float>(std::cos(Angle(shift, i)));
        cos_sin[2 * i + 1] = static_cast<float>(std::sin(Angle(shift, i)));
      }
      return Status::Ok();
    };
    Must(cache_->ShiftK(kLayer, delta, turn_, angles));
    shifted_ = true;
    for (auto& [cell, row] : Of(Side::kK)[stream])
      row.shift += delta[std::size_t{stream} * cells_ + cell];
  }

  void Copy() {
    const std::uint32_t from = in_.Below(streams_), to = in_.Below(streams_);
    const std::uint32_t what = in_.Below(4);  // mostly K then V, as the host does
    for (const Side side : {Side::kK, Side::kV}) {
      if (what == (side == Side::kK ? 2u : 3u)) continue;
      Must(cache_->CopySide(kLayer, side, from, to));
      if (from != to) Of(side)[to] = Of(side)[from];
    }
  }

  void Sinks() {
    std::vector<std::uint32_t> cells(1 + in_.Below(4));
    for (std::uint32_t& c : cells) c = in_.Below(cells_);
    cache_->MarkSinks(kLayer, in_.Below(streams_), cells);
  }

  void Clear() {
    cache_->Clear();
    for (auto& side : rows_)
      for (Rows& rows : side) rows.clear();
  }

  // One query per head over a random choice of the cells that have both sides; f16 only: what codes
  // lose is measured row by row.
  void Attend() {
    if (!heads_known_) return;
    const std::uint32_t stream = in_.Below(streams_);
    Random r(in_.U16());
    const Rows &ks = Of(Side::kK)[stream], &vs = Of(Side::kV)[stream];
    std::vector<half_t> mask(cells_, kShut);
    std::vector<std::uint32_t> open;
    for (const auto& [cell, row] : ks) {
      if (vs.count(cell) == 0 || r.Chance(0.2)) continue;
      mask[cell] = 0;
      open.push_back(cell);
    }
    std::vector<float> q(n_embd_), out(n_embd_, NAN);
    for (float& x : q) x = r.Normal();
    store::Cache::StreamJob job;
    job.stream = stream;
    job.job.q = q.data();
    job.job.q_tok_stride = job.job.out_tok_stride = n_embd_;
    job.job.q_head_stride = job.job.out_head_stride = dim_;
    job.job.out = out.data();
    job.job.mask = mask.data();
    job.job.mask_tok_stride = cells_;
    job.job.n_tok = 1;
    job.job.n_kv = cells_;
    attention::Params params;
    params.n_head = heads_;
    params.scale = 1.0f / std::sqrt(static_cast<float>(dim_));
    Must(cache_->Attend(kLayer, std::span(&job, 1), params, executor_));
    for (float x : out) Require(std::isfinite(x), "attention is not finite");
    if (type_.k != kTypes[0].k) return;
    for (std::uint32_t h = 0; h < heads_; ++h) {
      std::vector<double> want(dim_, 0.0);
      double sum = 0;
      for (std::uint32_t cell : open) {
        const std::vector<double> k = Turned(ks.at(cell));
        double s = 0;
        for (std::uint32_t c = 0; c < dim_; ++c) s += q[h * dim_ + c] * k[h * dim_ + c];
        const double p = std::exp(s * params.scale);
        sum += p;
        for (std::uint32_t c = 0; c < dim_; ++c)
          want[c] += p * HalfToFloat(vs.at(cell).data[h * dim_ + c]);
      }
      for (std::uint32_t c = 0; c < dim_; ++c)
        Require(std::abs(out[h * dim_ + c] - (sum == 0 ? 0 : want[c] / sum)) < 1e-2,
                "attention over f16 rows is wrong");
    }
  }

  Bytes& in_;
  const Type type_;
  std::uint32_t heads_ = 1, dim_ = 32, n_embd_ = 32, streams_ = 1, cells_ = 64;
  bool heads_known_ = false, shifted_ = false;
  store::TurnShape turn_;
  std::unique_ptr<store::Cache> cache_;
  std::vector<Rows> rows_[2];  // by side and stream
  SerialExecutor executor_;
};

}  // namespace
}  // namespace kvtamp::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  kvtamp::fuzz::Bytes in(data, size);
  kvtamp::fuzz::Machine machine(in);
  for (int steps = 0; !in.empty() && steps < 300; ++steps) machine.Step();
  machine.CheckRows();
  return 0;
}
