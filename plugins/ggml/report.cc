#include "plugins/ggml/report.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <vector>

#include "base/version.h"
#include "cpu/cpu.h"
#include "ggml.h"
#include "plugins/ggml/buffer.h"
#include "plugins/ggml/plugin.h"

namespace kvtamp::ggml_plugin {
namespace {

struct Book {
  std::recursive_mutex mutex;
  std::vector<Buffer*> buffers;
  std::vector<control::FallbackOp> fallbacks;
  control::Snapshot fullest;
  control::AtEnd at_end;
  std::atomic<bool> ending = false;  // at_end is set, and nothing was computed since
};
Book& book() {
  static Book* b = new Book;  // outlives every buffer, whatever the order of exit
  return *b;
}

}  // namespace

void Remember(Buffer* buffer) {
  std::lock_guard lock(book().mutex);
  book().buffers.push_back(buffer);
}

void Forget(Buffer* buffer) {
  std::lock_guard lock(book().mutex);
  std::erase(book().buffers, buffer);
}

int LastLayerWithK() {
  std::lock_guard lock(book().mutex);
  int last = -1;
  for (const Buffer* b : book().buffers) last = std::max(last, b->last_layer());
  return last;
}

bool IsOfSlidingWindows(const Buffer& buffer) {
  std::lock_guard lock(book().mutex);
  return std::any_of(book().buffers.begin(), book().buffers.end(), [&](const Buffer* other) {
    return other->n_cells() > buffer.n_cells() &&
           other->has_first_layer() != buffer.has_first_layer();
  });
}

control::Snapshot TakeSnapshot() {
  std::lock_guard lock(book().mutex);
  const auto settings = CurrentSettings();
  control::Snapshot s;
  s.version = KVTAMP_VERSION;
  s.device = kDeviceName;
  s.ggml_version = ggml_version();
  s.cpu = cpu::ActiveIsa();
  s.type = codec::PairName(settings->type);
  s.format_k = codec::FormatName(settings->type.k);
  s.format_v = codec::FormatName(settings->type.v);
  s.page_size = settings->page_size;
  s.n_sink = settings->n_sink;
  s.residual_length = settings->residual_length;
  s.policy = settings->prune.policy;
  for (Buffer* b : book().buffers) b->AddTo(s);
  for (const control::CacheStats& c : s.caches) {
    if (c.layers.empty()) continue;
    // Resolved to the model's head sizes, which the settings do not know.
    s.format_k = c.layers[0].format_k;
    s.format_v = c.layers[0].format_v;
    break;
  }
  s.fallback_ops = book().fallbacks;
  return s;
}

namespace {

void Keep(control::Snapshot now) {
  std::lock_guard lock(book().mutex);
  if (!book().ending) {
    book().at_end = {now.cells_used, now.logical_bytes(), now.stored_bytes(), now.resident.total()};
  }
  if (now.logical_bytes() + now.uncompressed_bytes >=
      book().fullest.logical_bytes() + book().fullest.uncompressed_bytes) {
    book().fullest = std::move(now);
  }
}

}  // namespace

void RememberBeforeLoss() { Keep(TakeSnapshot()); }

void RememberBeforeEnd() {
  Keep(TakeSnapshot());
  book().ending = true;
}

void NoteWork() { book().ending.store(false, std::memory_order_relaxed); }

control::Snapshot FinalSnapshot() {
  RememberBeforeLoss();
  std::lock_guard lock(book().mutex);
  control::Snapshot s = book().fullest;
  s.at_end = book().at_end;
  return s;
}

void NoteFallback(const std::string& op, const std::string& reason) {
  std::lock_guard lock(book().mutex);
  for (control::FallbackOp& f : book().fallbacks) {
    if (f.reason == reason) {
      f.count++;
      return;
    }
  }
  book().fallbacks.push_back({op, reason, 1});
  Log(LogLevel::kWarn, op + " is kept uncompressed and computed by ggml's own code: " + reason);
}

const char* StatsJsonNow() {
  thread_local std::string json;
  json = control::StatsJson(TakeSnapshot());
  return json.c_str();
}

void ReportAtExit() {
  const auto settings = CurrentSettings();
  const control::Snapshot s = FinalSnapshot();
  if (s.logical_bytes() + s.uncompressed_bytes > 0 && settings->log_level <= LogLevel::kWarn)
    std::fprintf(stderr, "%s\n", control::StatsText(s).c_str());
  if (settings->stats.empty()) return;
  std::FILE* f = std::fopen(settings->stats.c_str(), "w");
  if (f == nullptr) {
    std::fprintf(stderr, "kvtamp: cannot write %s; set KVTAMP_STATS to a writable file\n",
                 settings->stats.c_str());
    return;
  }
  std::fputs(control::StatsJson(s).c_str(), f);
  std::fclose(f);
}

}  // namespace kvtamp::ggml_plugin
