#include "plugins/ggml/abi_check.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>

#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "ggml.h"

// Newer than the rest. As weak symbols they let the plug-in load under a ggml that lacks them, so
// that a clear line is logged instead of the dynamic linker's.
#pragma weak ggml_backend_tensor_get_2d
#pragma weak ggml_backend_tensor_get_2d_async
#pragma weak ggml_backend_tensor_set_2d
#pragma weak ggml_backend_tensor_set_2d_async
#pragma weak ggml_flash_attn_ext_set_n_kv_max

namespace kvtamp::ggml_plugin {
namespace abi {
namespace {

#ifdef KVTAMP_GGML_VERSION
constexpr const char* kBuiltVersion = KVTAMP_GGML_VERSION;
#else
constexpr const char* kBuiltVersion = "(unknown version)";
#endif

constexpr std::string_view kTestedVersions[] = {"0.25.3", "0.26.0"};

// Words of the probed object that the current call reached. Per thread: nothing else may call them.
struct Hits {
  std::array<std::uint8_t, 4> words{};
  std::size_t n = 0;
  void Add(std::size_t word) noexcept {
    if (n < words.size()) words[n] = static_cast<std::uint8_t>(word);
    ++n;
  }
};
thread_local Hits t_hits;

// Stands in for a member of any signature: arguments are ignored, and 1 is a bool, a size, a status
// and a pointer that is not null. The probe passes one-byte tensors so that 1 is also their size.
template <std::size_t kWord>
std::uintptr_t Recorder() noexcept {
  t_hits.Add(kWord);
  return 1;
}

using Words = std::array<std::uintptr_t, kWords>;

template <std::size_t... kWord>
Words MakeRecorders(std::index_sequence<kWord...>) {
  return {reinterpret_cast<std::uintptr_t>(&Recorder<kWord>)...};
}

const Words& Recorders() {
  static const Words recorders = MakeRecorders(std::make_index_sequence<kWords>());
  return recorders;
}

// A data member holds its recorder's address as well: recognised when a getter returns it.
void HitBy(const void* returned) {
  const auto& all = Recorders();
  const auto it = std::find(all.begin(), all.end(), reinterpret_cast<std::uintptr_t>(returned));
  if (it != all.end()) t_hits.Add(static_cast<std::size_t>(it - all.begin()));
}

// What is handed to ggml.
struct Bench {
  Words words[kObjects];
  Words event_words;
  ggml_backend_buffer_type_t buft;
  ggml_backend_buffer_t buffer;  // freed by the call that reaches free_buffer
  ggml_backend_dev_t device;
  ggml_backend_reg_t reg;
  ggml_backend_t backend;
  ggml_backend_event_t event;
  ggml_tensor* a;
  ggml_tensor* b;
  ggml_cgraph* graph;
  std::size_t n = 0;  // for get_memory
  char byte = 0;
  alignas(16) unsigned char props[512];  // a host with a longer structure zeroes more
};

constexpr unsigned char kUntouched = 0xA5;

// As many words as we have rather than as many as our structure has: what a host with a longer
// structure copies beyond ours must be recorders too. Structures of this size travel in memory, so
// the callee simply reads the words it knows.
ggml_backend_buffer_t InitBuffer(ggml_backend_buffer_type_t buft, const Words& words) {
  struct Wide {
    Words words;
  };
  using Init = ggml_backend_buffer_t (*)(ggml_backend_buffer_type_t, Wide, void*, std::size_t);
  const auto init = reinterpret_cast<Init>(reinterpret_cast<void (*)()>(&ggml_backend_buffer_init));
  return init(buft, Wide{words}, nullptr, 1);
}

// One expected place.
struct Row {
  Object object;
  std::size_t word;
  const char* name;
  const char* function;  // the public function that leads there; null if none does
  const void* address;   // its address, null if this ggml lacks it
  void (*call)(Bench& x);
};

#define KVTAMP_ROW(object, type, place, name, function, call)                \
  {                                                                          \
    Object::object, offsetof(type, place) / sizeof(void*), #name, #function, \
        reinterpret_cast<const void*>(&(function)), [](Bench& x) { call; }   \
  }
#define KVTAMP_CALL(object, type, member, function, args) \
  KVTAMP_ROW(object, type, iface.member, member, function, (void)function args)
#define KVTAMP_FIELD(object, type, member, function, args) \
  KVTAMP_ROW(object, type, member, member, function, HitBy(function args))
#define KVTAMP_HIDDEN(object, type, place, name) \
  { Object::object, offsetof(type, place) / sizeof(void*), #name, nullptr, nullptr, nullptr }

#define KVTAMP_BUFT(...) KVTAMP_CALL(kBufferType, ggml_backend_buffer_type, __VA_ARGS__)
#define KVTAMP_BUFFER(...) KVTAMP_CALL(kBuffer, ggml_backend_buffer, __VA_ARGS__)
#define KVTAMP_DEVICE(...) KVTAMP_CALL(kDevice, ggml_backend_device, __VA_ARGS__)
#define KVTAMP_REG(...) KVTAMP_CALL(kRegistry, ggml_backend_reg, __VA_ARGS__)
#define KVTAMP_BACKEND(...) KVTAMP_CALL(kBackend, ggml_backend, __VA_ARGS__)

// clang-format off
const Row kRows[] = {
    KVTAMP_BUFT(get_name, ggml_backend_buft_name, (x.buft)),
    KVTAMP_BUFT(alloc_buffer, ggml_backend_buft_alloc_buffer, (x.buft, 1)),
    KVTAMP_BUFT(get_alignment, ggml_backend_buft_get_alignment, (x.buft)),
    KVTAMP_BUFT(get_max_size, ggml_backend_buft_get_max_size, (x.buft)),
    KVTAMP_BUFT(get_alloc_size, ggml_backend_buft_get_alloc_size, (x.buft, x.a)),
    KVTAMP_BUFT(is_host, ggml_backend_buft_is_host, (x.buft)),
    KVTAMP_FIELD(kBufferType, ggml_backend_buffer_type, device,
                 ggml_backend_buft_get_device, (x.buft)),
    KVTAMP_HIDDEN(kBufferType, ggml_backend_buffer_type, context, context),

    KVTAMP_BUFFER(get_base, ggml_backend_buffer_get_base, (x.buffer)),
    KVTAMP_BUFFER(init_tensor, ggml_backend_buffer_init_tensor, (x.buffer, x.a)),
    KVTAMP_BUFFER(memset_tensor, ggml_backend_tensor_memset, (x.a, 0, 0, 1)),
    KVTAMP_BUFFER(set_tensor, ggml_backend_tensor_set, (x.a, &x.byte, 0, 1)),
    KVTAMP_BUFFER(get_tensor, ggml_backend_tensor_get, (x.a, &x.byte, 0, 1)),
    KVTAMP_BUFFER(set_tensor_2d, ggml_backend_tensor_set_2d, (x.a, &x.byte, 0, 1, 2, 0, 0)),
    KVTAMP_BUFFER(get_tensor_2d, ggml_backend_tensor_get_2d, (x.a, &x.byte, 0, 1, 2, 0, 0)),
    KVTAMP_BUFFER(cpy_tensor, ggml_backend_buffer_copy_tensor, (x.a, x.b)),
    KVTAMP_BUFFER(clear, ggml_backend_buffer_clear, (x.buffer, 0)),
    KVTAMP_BUFFER(reset, ggml_backend_buffer_reset, (x.buffer)),
    // Last, because ggml then deletes the buffer. Its data members are CompareBuffer's.
    KVTAMP_BUFFER(free_buffer, ggml_backend_buffer_free, (x.buffer)),

    KVTAMP_DEVICE(get_name, ggml_backend_dev_name, (x.device)),
    KVTAMP_DEVICE(get_description, ggml_backend_dev_description, (x.device)),
    KVTAMP_DEVICE(get_memory, ggml_backend_dev_memory, (x.device, &x.n, &x.n)),
    KVTAMP_DEVICE(get_type, ggml_backend_dev_type, (x.device)),
    KVTAMP_DEVICE(get_props, ggml_backend_dev_get_props,
                  (x.device, reinterpret_cast<ggml_backend_dev_props*>(x.props))),
    KVTAMP_DEVICE(init_backend, ggml_backend_dev_init, (x.device, nullptr)),
    KVTAMP_DEVICE(get_buffer_type, ggml_backend_dev_buffer_type, (x.device)),
    KVTAMP_DEVICE(get_host_buffer_type, ggml_backend_dev_host_buffer_type, (x.device)),
    KVTAMP_DEVICE(buffer_from_host_ptr, ggml_backend_dev_buffer_from_host_ptr,
                  (x.device, &x.byte, 1, 1)),
    KVTAMP_DEVICE(supports_op, ggml_backend_dev_supports_op, (x.device, x.a)),
    KVTAMP_DEVICE(supports_buft, ggml_backend_dev_supports_buft, (x.device, x.buft)),
    KVTAMP_DEVICE(offload_op, ggml_backend_dev_offload_op, (x.device, x.a)),
    KVTAMP_DEVICE(event_new, ggml_backend_event_new, (x.device)),
    KVTAMP_DEVICE(event_free, ggml_backend_event_free, (x.event)),
    KVTAMP_DEVICE(event_synchronize, ggml_backend_event_synchronize, (x.event)),
    KVTAMP_FIELD(kDevice, ggml_backend_device, reg, ggml_backend_dev_backend_reg, (x.device)),
    KVTAMP_HIDDEN(kDevice, ggml_backend_device, context, context),

    KVTAMP_REG(get_name, ggml_backend_reg_name, (x.reg)),
    KVTAMP_REG(get_device_count, ggml_backend_reg_dev_count, (x.reg)),
    KVTAMP_REG(get_device, ggml_backend_reg_dev_get, (x.reg, 0)),
    KVTAMP_REG(get_proc_address, ggml_backend_reg_get_proc_address, (x.reg, "")),
    KVTAMP_HIDDEN(kRegistry, ggml_backend_reg, context, context),

    KVTAMP_FIELD(kBackend, ggml_backend, guid, ggml_backend_guid, (x.backend)),
    KVTAMP_BACKEND(get_name, ggml_backend_name, (x.backend)),
    KVTAMP_BACKEND(free, ggml_backend_free, (x.backend)),
    KVTAMP_BACKEND(set_tensor_async, ggml_backend_tensor_set_async,
                   (x.backend, x.a, &x.byte, 0, 1)),
    KVTAMP_BACKEND(get_tensor_async, ggml_backend_tensor_get_async,
                   (x.backend, x.a, &x.byte, 0, 1)),
    KVTAMP_BACKEND(set_tensor_2d_async, ggml_backend_tensor_set_2d_async,
                   (x.backend, x.a, &x.byte, 0, 1, 2, 0, 0)),
    KVTAMP_BACKEND(get_tensor_2d_async, ggml_backend_tensor_get_2d_async,
                   (x.backend, x.a, &x.byte, 0, 1, 2, 0, 0)),
    KVTAMP_BACKEND(cpy_tensor_async, ggml_backend_tensor_copy_async,
                   (x.backend, x.backend, x.a, x.b)),
    KVTAMP_BACKEND(synchronize, ggml_backend_synchronize, (x.backend)),
    KVTAMP_BACKEND(graph_plan_create, ggml_backend_graph_plan_create, (x.backend, x.graph)),
    KVTAMP_BACKEND(graph_plan_free, ggml_backend_graph_plan_free, (x.backend, nullptr)),
    KVTAMP_HIDDEN(kBackend, ggml_backend, iface.graph_plan_update, graph_plan_update),
    KVTAMP_BACKEND(graph_plan_compute, ggml_backend_graph_plan_compute, (x.backend, nullptr)),
    KVTAMP_BACKEND(graph_compute, ggml_backend_graph_compute_async, (x.backend, x.graph)),
    KVTAMP_BACKEND(event_record, ggml_backend_event_record, (x.event, x.backend)),
    KVTAMP_BACKEND(event_wait, ggml_backend_event_wait, (x.backend, x.event)),
    // Only a whole scheduler leads there.
    KVTAMP_HIDDEN(kBackend, ggml_backend, iface.graph_optimize, graph_optimize),
    KVTAMP_FIELD(kBackend, ggml_backend, device, ggml_backend_get_device, (x.backend)),
    KVTAMP_HIDDEN(kBackend, ggml_backend, context, context),
};

// The kinds of operation and of number that the plug-in knows by their number. Ascending: the first
// difference ends the walk, so that no name is asked for beyond the end of a shorter table.
#define KVTAMP_OP(name) {GGML_OP_##name, #name}
constexpr std::pair<ggml_op, const char*> kOps[] = {
    KVTAMP_OP(NONE), KVTAMP_OP(DUP), KVTAMP_OP(ADD), KVTAMP_OP(MUL), KVTAMP_OP(NORM),
    KVTAMP_OP(MUL_MAT), KVTAMP_OP(SCALE), KVTAMP_OP(SET), KVTAMP_OP(CPY), KVTAMP_OP(CONT),
    KVTAMP_OP(RESHAPE), KVTAMP_OP(VIEW), KVTAMP_OP(PERMUTE), KVTAMP_OP(TRANSPOSE),
    KVTAMP_OP(GET_ROWS), KVTAMP_OP(SET_ROWS), KVTAMP_OP(ROPE), KVTAMP_OP(FLASH_ATTN_EXT),
    KVTAMP_OP(SSM_SCAN),
};
constexpr std::pair<ggml_type, const char*> kTypes[] = {
    {GGML_TYPE_F32, "f32"}, {GGML_TYPE_F16, "f16"}, {GGML_TYPE_Q4_0, "q4_0"},
    {GGML_TYPE_Q8_0, "q8_0"}, {GGML_TYPE_I32, "i32"}, {GGML_TYPE_I64, "i64"},
    {GGML_TYPE_BF16, "bf16"},
};
// clang-format on

// Members that not every version has. The plug-in leaves them null, and the functions that lead
// there are as new as they are.
template <class Type>
void AddNewer(std::vector<Row>& rows) {
  if constexpr (requires(Type t) { t.iface.alloc_buffer_n; }) {
    rows.push_back(KVTAMP_HIDDEN(kBufferType, Type, iface.alloc_buffer_n, alloc_buffer_n));
  }
  if constexpr (requires(Type t) { t.iface.get_alloc_size_n; }) {
    rows.push_back(KVTAMP_HIDDEN(kBufferType, Type, iface.get_alloc_size_n, get_alloc_size_n));
  }
}

const std::vector<Row>& Rows() {
  static const std::vector<Row> rows = [] {
    std::vector<Row> all(std::begin(kRows), std::end(kRows));
    AddNewer<ggml_backend_buffer_type>(all);
    return all;
  }();
  return rows;
}

static_assert(sizeof(void*) == sizeof(void (*)()) && sizeof(void*) == sizeof(std::uintptr_t));
static_assert(sizeof(ggml_backend) <= (kWords - 16) * sizeof(void*));  // the longest

// One group of facts on its way into the list.
class Group {
 public:
  explicit Group(Facts& facts) : facts_(facts) {}
  template <class T>
  requires std::is_arithmetic_v<T>
  void Add(std::string what, std::type_identity_t<T> expected, T found) {
    Add(std::move(what), std::to_string(expected), std::to_string(found));
  }
  void Add(std::string what, std::string expected, std::string found) {
    ok_ = ok_ && expected == found;
    facts_.list.push_back({std::move(what), std::move(expected), std::move(found)});
  }
  void Holds(std::string what, bool there) {
    Add(std::move(what), "at its place", there ? "at its place" : "elsewhere");
  }
  bool ok() const { return ok_; }

 private:
  Facts& facts_;
  bool ok_ = true;
};

std::string OrNull(const char* s) { return s == nullptr ? "(null)" : s; }

bool CompareNumbers(Group group) {
  for (const auto& [op, name] : kOps) {
    group.Add("operation " + std::to_string(op), name, OrNull(ggml_op_name(op)));
    if (!group.ok()) return false;
  }
  for (const auto& [type, name] : kTypes) {
    group.Add("type " + std::to_string(type), name, OrNull(ggml_type_name(type)));
    if (!group.ok()) return false;
  }
  // ggml_object, the header of everything in a context, is private.
  constexpr std::size_t kObjectHeader = 32;
  group.Add("ggml_tensor_overhead()", kObjectHeader + sizeof(ggml_tensor), ggml_tensor_overhead());
  return group.ok();
}

float FloatParam(const ggml_tensor* t, int i) {
  float f;
  std::memcpy(&f, &t->op_params[i], sizeof f);
  return f;
}

bool CompareTensors(Group group, ggml_context* ctx, ggml_cgraph* graph) {
  ggml_tensor* cache = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, 64, 32);
  ggml_tensor* rows = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 2);
  ggml_tensor* index = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, 2);
  ggml_tensor* set = ggml_set_rows(ctx, cache, rows, index);
  group.Holds("ggml_tensor.op", set->op == GGML_OP_SET_ROWS);
  group.Holds("ggml_tensor.type", set->type == GGML_TYPE_F16);
  group.Holds("ggml_tensor.src of SET_ROWS",
              set->src[0] == rows && set->src[1] == index && set->src[2] == cache);
  group.Holds("ggml_tensor.view_src", set->view_src == cache);

  ggml_tensor* q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 64, 3, 4, 2);
  ggml_tensor* k = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 64, 32, 2, 2);
  ggml_tensor* v = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 48, 32, 2, 2);
  ggml_tensor* mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, 32, 3, 1, 2);
  ggml_tensor* sinks = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 4);
  ggml_tensor* fa = ggml_flash_attn_ext(ctx, q, k, v, mask, 0.125F, 8.0F, 30.0F);
  ggml_flash_attn_ext_add_sinks(fa, sinks);
  constexpr std::int64_t kNe[] = {48, 4, 3, 2};
  constexpr std::size_t kNb[] = {4, 192, 768, 2304};
  group.Holds("ggml_tensor.ne", std::equal(std::begin(kNe), std::end(kNe), fa->ne));
  group.Holds("ggml_tensor.nb", std::equal(std::begin(kNb), std::end(kNb), fa->nb));
  group.Holds("ggml_tensor.src of FLASH_ATTN_EXT",
              fa->src[0] == q && fa->src[1] == k && fa->src[2] == v && fa->src[3] == mask &&
                  fa->src[4] == sinks && fa->src[5] == nullptr);
  group.Holds("ggml_tensor.op_params of FLASH_ATTN_EXT", FloatParam(fa, 0) == 0.125F &&
                                                             FloatParam(fa, 1) == 8.0F &&
                                                             FloatParam(fa, 2) == 30.0F);
  fa->op_params[3] = GGML_PREC_F32;
  group.Holds("the precision of FLASH_ATTN_EXT", ggml_flash_attn_ext_get_prec(fa) == GGML_PREC_F32);
  // A ggml without the function never sets the bound, and 0 means none.
  const bool bounded = &ggml_flash_attn_ext_set_n_kv_max != nullptr;
  if (bounded) ggml_flash_attn_ext_set_n_kv_max(fa, 17);
  group.Holds("the n_kv_max of FLASH_ATTN_EXT", fa->op_params[4] == (bounded ? 17 : 0));

  ggml_tensor* heads = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, 16, 2, 3);
  ggml_tensor* shift = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, 3);
  ggml_tensor* rope = ggml_rope_ext_inplace(ctx, heads, shift, nullptr, 8, 2, 512, 1e4F, 0.5F,
                                            0.25F, 0.75F, 32.0F, 1.0F);
  constexpr float kRope[] = {1e4F, 0.5F, 0.25F, 0.75F, 32.0F, 1.0F};
  bool rope_fits = rope->op_params[1] == 8 && rope->op_params[2] == 2 && rope->op_params[4] == 512;
  for (int i = 0; i < 6; ++i) rope_fits = rope_fits && FloatParam(rope, 5 + i) == kRope[i];
  group.Holds("ggml_tensor.op_params of ROPE", rope_fits);
  group.Holds("ggml_tensor.src of ROPE", rope->src[0] == heads && rope->src[1] == shift);

  ggml_tensor* view = ggml_view_2d(ctx, cache, 16, 4, cache->nb[1], 3 * cache->nb[1] + 32);
  group.Holds("ggml_tensor.view_offs", view->view_offs == 3 * 128 + 32);
  ggml_set_name(view, "kvtamp");
  group.Holds("ggml_tensor.name", std::strcmp(view->name, "kvtamp") == 0);
  ggml_set_output(view);
  group.Holds("ggml_tensor.flags", view->flags == GGML_TENSOR_FLAG_OUTPUT);
  ggml_build_forward_expand(graph, set);
  group.Holds("the flag of nodes to compute", (set->flags & GGML_TENSOR_FLAG_COMPUTE) != 0);
  group.Holds("ggml_graph_node()",
              ggml_graph_n_nodes(graph) == 1 && ggml_graph_node(graph, 0) == set);

  // ggml's own buffer: nothing here depends on how ours would be laid out.
  alignas(64) unsigned char memory[64];
  ggml_backend_buffer_t buffer = ggml_backend_cpu_buffer_from_ptr(memory, sizeof memory);
  ggml_backend_tensor_alloc(buffer, index, memory);
  group.Holds("ggml_tensor.buffer", index->buffer == buffer);
  group.Holds("ggml_tensor.data", index->data == memory);
  ggml_backend_buffer_free(buffer);
  return group.ok();
}

std::string NameOf(Object object, std::size_t word) {
  for (const Row& row : Rows()) {
    if (row.object == object && row.word == word) return row.name;
  }
  return "word " + std::to_string(word);
}

std::string Answered(Object object) {
  std::string names;
  for (std::size_t i = 0; i < std::min(t_hits.n, t_hits.words.size()); ++i) {
    names += (i == 0 ? "" : " and ") + NameOf(object, t_hits.words[i]);
  }
  return names.empty() ? "nothing" : names;
}

void Fill(Bench& x, const Layout& layout, ggml_context* ctx, ggml_cgraph* graph) {
  for (std::size_t o = 0; o < kObjects; ++o) {
    for (std::size_t w = 0; w < kWords; ++w) x.words[o][w] = Recorders()[layout[o][w]];
  }
  const auto object = [&](Object o) { return x.words[static_cast<std::size_t>(o)].data(); };
  x.buft = reinterpret_cast<ggml_backend_buffer_type_t>(object(Object::kBufferType));
  x.device = reinterpret_cast<ggml_backend_dev_t>(object(Object::kDevice));
  x.reg = reinterpret_cast<ggml_backend_reg_t>(object(Object::kRegistry));
  x.backend = reinterpret_cast<ggml_backend_t>(object(Object::kBackend));
  // An event is followed to its device, wherever ggml looks for that.
  x.event_words.fill(reinterpret_cast<std::uintptr_t>(x.device));
  x.event = reinterpret_cast<ggml_backend_event_t>(x.event_words.data());
  std::fill(std::begin(x.props), std::end(x.props), kUntouched);
  x.graph = graph;
  x.buffer = InitBuffer(x.buft, x.words[static_cast<std::size_t>(Object::kBuffer)]);
  x.a = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, 1);
  x.b = ggml_new_tensor_1d(ctx, GGML_TYPE_I8, 1);
  for (ggml_tensor* t : {x.a, x.b}) {
    t->buffer = x.buffer;
    t->data = &x.byte;
  }
}

bool CompareSlots(Group group, Bench& x) {
  for (const Row& row : Rows()) {
    if (row.function == nullptr) continue;
    t_hits = {};
    if (row.address != nullptr) row.call(x);
    group.Add("what " + std::string(row.function) + " reaches", row.name, Answered(row.object));
  }
  const auto zeroed = std::find(std::begin(x.props), std::end(x.props), kUntouched);
  group.Add("the size of ggml_backend_dev_props", sizeof(ggml_backend_dev_props),
            static_cast<std::size_t>(zeroed - std::begin(x.props)));
  return group.ok();
}

// The plug-in reads these members of buffers that ggml creates.
bool CompareBuffer(Group group, Bench& x) {
  ggml_backend_buffer_t buffer = ggml_backend_buffer_init(x.buft, {}, &x.byte, 4096);
  ggml_backend_buffer_set_usage(buffer, GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  group.Holds("ggml_backend_buffer.buft", buffer->buft == x.buft);
  group.Holds("ggml_backend_buffer.context", buffer->context == &x.byte);
  group.Holds("ggml_backend_buffer.size", buffer->size == 4096);
  group.Holds("ggml_backend_buffer.usage", buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  ggml_backend_buffer_free(buffer);
  return group.ok();
}

}  // namespace

Layout OwnLayout() {
  Layout layout;
  for (auto& object : layout) {
    for (std::size_t w = 0; w < kWords; ++w) object[w] = static_cast<std::uint8_t>(w);
  }
  return layout;
}

std::vector<Slot> Slots() {
  std::vector<Slot> slots;
  for (const Row& row : Rows()) {
    slots.push_back({row.object, row.word, row.name, row.function != nullptr});
  }
  return slots;
}

Facts Observe(const Layout& layout) {
  Facts facts;
  facts.version = HostGgmlVersion();
  if (!CompareNumbers(Group(facts))) return facts;

  constexpr std::size_t kTensors = 32;
  constexpr std::size_t kNodes = 8;
  const std::size_t bytes =
      kTensors * ggml_tensor_overhead() + ggml_graph_overhead_custom(kNodes, false);
  const std::unique_ptr<ggml_context, decltype(&ggml_free)> ctx(ggml_init({bytes, nullptr, true}),
                                                                &ggml_free);
  if (ctx == nullptr) {
    Group(facts).Holds("ggml_init()", false);
    return facts;
  }
  ggml_cgraph* graph = ggml_new_graph_custom(ctx.get(), kNodes, false);
  if (!CompareTensors(Group(facts), ctx.get(), graph)) return facts;

  const auto bench = std::make_unique<Bench>();
  Fill(*bench, layout, ctx.get(), graph);
  if (CompareSlots(Group(facts), *bench)) CompareBuffer(Group(facts), *bench);
  return facts;
}

Status CheckAgainst(const Facts& facts) {
  const Fact* first = nullptr;
  std::size_t n = 0;
  for (const Fact& fact : facts.list) {
    if (fact.expected == fact.found) continue;
    if (first == nullptr) first = &fact;
    ++n;
  }
  if (first == nullptr) return Status::Ok();
  const std::string more = n == 1 ? "" : ", and " + std::to_string(n - 1) + " more";
  return Status::Unsupported("this process has ggml " + facts.version +
                             ", whose layout differs from what this plug-in was built for, " +
                             BuiltAgainst() + ": " + first->what + " is " + first->found +
                             ", expected " + first->expected + more +
                             ". Build the plug-in again, with KVTAMP_LLAMA_DIR set to the "
                             "llama.cpp that is to load it");
}

std::vector<std::string_view> TestedVersions() {
  return {std::begin(kTestedVersions), std::end(kTestedVersions)};
}

std::string NoteOn(const std::string& version) {
  std::string tested;
  for (const std::string_view v : kTestedVersions) {
    if (v == version) return {};
    tested += (tested.empty() ? "" : ", ") + std::string(v);
  }
  return "ggml " + version + " was never tested with this plug-in (tested: " + tested +
         "), but its layout fits";
}

}  // namespace abi

Status CheckHostAbi(std::string& note) {
  note.clear();
  try {
    Status status = abi::CheckAgainst(abi::Observe(abi::OwnLayout()));
    if (status.ok()) note = abi::NoteOn(abi::OrNull(ggml_version()));
    return status;
  } catch (...) {  // the host is C
    return Status::Internal("cannot check ggml's layout: out of memory");
  }
}

std::string BuiltAgainst() {
  return std::string("ggml ") + abi::kBuiltVersion + ", backend API " +
         std::to_string(GGML_BACKEND_API_VERSION);
}

std::string HostGgmlVersion() {
  const std::string commit = abi::OrNull(ggml_commit());
  return abi::OrNull(ggml_version()) + (commit == "unknown" ? "" : " (" + commit + ")");
}

}  // namespace kvtamp::ggml_plugin
