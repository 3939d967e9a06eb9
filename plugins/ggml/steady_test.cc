// What a decoded token costs besides arithmetic: no allocation, no lock, no system call of ours.
// Excepted are tokens with which a page begins, grows (at rows 16 and 32) or ends and is coded, or
// a bucket of 64 cells of the index begins.
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "plugins/ggml/counts.h"
#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

constexpr Half kOpen = 0, kMasked = 0xFC00;

// Decodes as a host does: one graph for each layer, made once and computed for every token, with
// new contents of its inputs. Cells of a stream's sequences take turns.
class Decoder {
 public:
  Decoder(const std::string& type, int n_streams, int n_seqs, int n_threads)
      : dims_{.n_head_kv = 3, .n_cells = 768, .n_streams = n_streams, .n_layers = 2},
        n_seqs_(n_seqs),
        ours_(NewBackend({type}, n_threads)),
        cache_(OurType(), dims_),
        layers_(static_cast<std::size_t>(dims_.n_layers)) {
    Random random(Seed(900));
    const auto n = static_cast<std::size_t>(n_streams * n_seqs);
    Batch b;
    b.n_head = 9;
    b.n_tok = n_seqs;
    b.ns = n_streams;
    b.n_kv = dims_.n_cells;
    b.scale = 0.125f;
    b.cells.resize(n);
    b.mask.assign(n * static_cast<std::size_t>(b.n_kv), kMasked);
    b.q = random.Normals(n * static_cast<std::size_t>(b.n_head * dims_.dk));
    for (std::size_t il = 0; il < layers_.size(); ++il) {
      Layer& l = layers_[il];
      ggml_tensor *k = cache_.k[il], *v = cache_.v[il];
      const auto set = [&](ggml_tensor* cache, std::int64_t n_embd) {
        ggml_tensor* t =
            SetRows(l.graph, cache, b, random.Normals(n * static_cast<std::size_t>(n_embd)));
        ggml_build_forward_expand(l.graph.get(), t);
        return static_cast<std::int64_t*>(t->src[1]->data);
      };
      l.cells[0] = set(k, dims_.n_embd_k());
      l.cells[1] = set(v, dims_.n_embd_v());
      l.out = Attend(l.graph, b, Queries(l.graph, b, dims_.dk),
                     CacheView(l.graph, k, dims_.dk, dims_.n_head_kv, b),
                     CacheView(l.graph, v, dims_.dv, dims_.n_head_kv, b));
      l.mask = static_cast<Half*>(l.out->src[3]->data);
      l.graph.Add(l.out);
      EXPECT_TRUE(ggml_backend_supports_op(ours_.get(), l.out));  // as the scheduler asks
    }
    read_.resize(ggml_nbytes(layers_[0].out));
  }

  // One more token of each sequence, through all layers.
  void Step(Counts* counts = nullptr) {
    for (Layer& l : layers_) {
      for (std::int64_t s = 0, row = 0; s < dims_.n_streams; ++s) {
        for (std::int64_t seq = 0; seq < n_seqs_; ++seq, ++row) {
          const std::int64_t cell = pos_ * n_seqs_ + seq;
          l.cells[0][row] = l.cells[1][row] = s * dims_.n_cells + cell;
          l.mask[row * dims_.n_cells + cell] = kOpen;
        }
      }
    }
    pos_++;
    // The first is computed before: ggml allocates for it.
    for (Layer& l : layers_) {
      if (pos_ == 1) {
        EXPECT_EQ(l.graph.Compute(ours_.get()), GGML_STATUS_SUCCESS);
      }
    }
    if (counts != nullptr) StartCounting();
    for (Layer& l : layers_) {
      if (ggml_backend_graph_compute(ours_.get(), l.graph.get()) != GGML_STATUS_SUCCESS) failed_++;
      ggml_backend_tensor_get(l.out, read_.data(), 0, read_.size());  // as the scheduler does
    }
    if (counts != nullptr) *counts = StopCounting();
    EXPECT_EQ(failed_, 0);
  }

  int pos() const { return static_cast<int>(pos_); }

 private:
  struct Layer {
    Graph graph;
    std::int64_t* cells[2];
    Half* mask;
    ggml_tensor* out;
  };
  const Dims dims_;
  const std::int64_t n_seqs_;
  ggml_backend_ptr ours_;
  Cache cache_;
  std::vector<Layer> layers_;
  std::vector<std::uint8_t> read_;
  std::int64_t pos_ = 0;
  int failed_ = 0;
};

// Streams, sequences of each, threads. System calls are the team's own where there is one.
struct Form {
  const char* type;
  int n_streams, n_seqs, n_threads;
};

class Steady : public ::testing::TestWithParam<Form> {};

TEST_P(Steady, NoAllocationNoLockNoSystemCall) {
  const Form form = GetParam();
  Decoder decoder(form.type, form.n_streams, form.n_seqs, form.n_threads);
  // Three pages, of which two are out of the recent window, and half of the next.
  while (decoder.pos() < 3 * 64 + 36) decoder.Step();
  EXPECT_GT(Stats()["pages"]["sealed"], 0);
  EXPECT_EQ(Stats()["uncompressed_bytes"], 0);
  for (int i = 0; i < 16; ++i) {
    Counts counts;
    decoder.Step(&counts);
    SCOPED_TRACE("token " + std::to_string(decoder.pos()));
    EXPECT_EQ(counts.allocations, 0);
    EXPECT_EQ(counts.locks, 0);
    if (form.n_threads == 1) {
      EXPECT_EQ(counts.system_call, -1);
    }
  }
  Counts new_page;
  while (decoder.pos() % 64 != 0) decoder.Step();
  decoder.Step(&new_page);
  EXPECT_GT(new_page.allocations, 0) << "of the plug-in none is seen";
}

INSTANTIATE_TEST_SUITE_P(Forms, Steady,
                         ::testing::Values(Form{"k4v4", 1, 1, 1}, Form{"f16", 1, 1, 1},
                                           Form{"k4v4", 3, 1, 1}, Form{"f16", 3, 1, 1},
                                           Form{"k4v4", 1, 2, 1}, Form{"f16", 1, 2, 1},
                                           Form{"k3.5v3", 1, 1, 1}, Form{"k4v4", 1, 1, 2},
                                           Form{"k4v4", 3, 1, 2}),
                         [](const auto& info) {
                           const Form& f = info.param;
                           std::string name = f.type;
                           std::erase(name, '.');
                           return name + "_" + std::to_string(f.n_streams) + "streams_" +
                                  std::to_string(f.n_seqs) + "seqs_" + std::to_string(f.n_threads) +
                                  "threads";
                         });

// The counts count.
TEST(Counts, SeeEachKind) {
  const auto counted = [](auto&& f) {
    StartCounting();
    f();
    return StopCounting();
  };
  const Counts none = counted([] {});
  EXPECT_EQ(none.allocations, 0);
  EXPECT_EQ(none.locks, 0);
  EXPECT_EQ(none.system_call, -1);
  void* volatile p = nullptr;
  EXPECT_EQ(counted([&] { p = operator new(64); }).allocations, 1);
  EXPECT_EQ(counted([&] { operator delete(p); }).allocations, 1);
  pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
  EXPECT_EQ(counted([&] { pthread_mutex_lock(&mutex); }).locks, 1);
  if (!SystemCallsAreSeen()) GTEST_SKIP() << "this kernel does not tell of system calls";
  long parent = 0;
  EXPECT_EQ(counted([&] { parent = syscall(SYS_getppid); }).system_call, SYS_getppid);
  EXPECT_EQ(parent, getppid());
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
