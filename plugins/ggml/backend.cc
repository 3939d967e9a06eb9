// Registration, device, buffer type, backend: the plug-in as ggml sees it, top to bottom. All that
// computes is in ops.cc, all that remembers in buffer.cc.
#include <dlfcn.h>
#include <link.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>

#include "base/log.h"
#include "base/version.h"
#include "cpu/cpu.h"
#include "ggml-backend-impl.h"
#include "ggml-backend.h"
#include "plugins/ggml/abi_check.h"
#include "plugins/ggml/buffer.h"
#include "plugins/ggml/ops.h"
#include "plugins/ggml/plugin.h"
#include "plugins/ggml/report.h"

// Exported by ggml-base, declared in its private ggml-impl.h.
extern "C" void ggml_log_internal(enum ggml_log_level level, const char* format, ...);

namespace kvtamp::ggml_plugin {
namespace {

// --- settings and log ---------------------------------------------------------------------------

std::mutex g_mutex;
std::shared_ptr<const control::Settings> g_settings;

void HostLog(LogLevel level, const char* line, void*) {
  const auto settings = CurrentSettings();
  if (settings != nullptr && level < settings->log_level) return;
  const ggml_log_level to = level == LogLevel::kError  ? GGML_LOG_LEVEL_ERROR
                            : level == LogLevel::kWarn ? GGML_LOG_LEVEL_WARN
                            : level == LogLevel::kInfo ? GGML_LOG_LEVEL_INFO
                                                       : GGML_LOG_LEVEL_DEBUG;
  ggml_log_internal(to, "kvtamp: %s\n", line);
}

// Applies what the process-wide parts need; false with `why` when something is wrong.
bool LoadInto(std::shared_ptr<const control::Settings>& out, std::string& why) {
  auto loaded = control::LoadSettings();
  if (!loaded.ok()) {
    why = loaded.status().message();
    return false;
  }
  if (Status s = cpu::ForceIsa(loaded.value().cpu); !s.ok()) {
    why = s.message();
    return false;
  }
  out = std::make_shared<const control::Settings>(std::move(loaded.value()));
  return true;
}

// --- memory the device reports ------------------------------------------------------------------

// The host fits contexts by comparing uncompressed sizes with this, so memory is shown as what it
// holds once compressed. Rounded down: f16 rows and overhead come on top of the codes.
std::size_t SystemBytes(const char* key) {
  std::ifstream in("/proc/meminfo");
  std::string name;
  std::size_t kib = 0;
  while (in >> name >> kib) {
    if (name == key) return kib * 1024;
    in.ignore(64, '\n');
  }
  return std::size_t{4} << 30;
}

double ExpectedFactor() {
  const auto settings = CurrentSettings();
  const codec::Pair& type = settings->type;
  auto bits = [](const codec::Format& f, codec::Side side) {
    auto r = codec::Resolve(f, side, 64);
    return r.ok() ? codec::BitsPerElement(r.value(), side, 64, 64) : 16.0;
  };
  const double mean = (bits(type.k, codec::Side::kK) + bits(type.v, codec::Side::kV)) / 2;
  return std::max(1.0, 0.9 * 16.0 / mean);
}

// --- backend ------------------------------------------------------------------------------------

Backend* Of(ggml_backend_t b) { return static_cast<Backend*>(b->context); }

const ggml_backend_i kBackendInterface = {
    /* .get_name            = */ [](ggml_backend_t) { return kDeviceName; },
    /* .free                = */
    [](ggml_backend_t b) {
      delete Of(b);
      delete b;
    },
    /* .set_tensor_async    = */ nullptr,
    /* .get_tensor_async    = */ nullptr,
    /* .set_tensor_2d_async = */ nullptr,
    /* .get_tensor_2d_async = */ nullptr,
    /* .cpy_tensor_async    = */ nullptr,
    /* .synchronize         = */ nullptr,
    /* .graph_plan_create   = */ nullptr,
    /* .graph_plan_free     = */ nullptr,
    /* .graph_plan_update   = */ nullptr,
    /* .graph_plan_compute  = */ nullptr,
    /* .graph_compute       = */
    [](ggml_backend_t b, ggml_cgraph* graph) { return Of(b)->Compute(graph); },
    /* .event_record        = */ nullptr,
    /* .event_wait          = */ nullptr,
    /* .graph_optimize      = */ nullptr,
};

ggml_guid_t Guid() {
  static ggml_guid guid = {0x6b, 0x76, 0x74, 0x61, 0x6d, 0x70, 0x2d, 0x67,
                           0x67, 0x6d, 0x6c, 0x2d, 0x30, 0x30, 0x30, 0x31};
  return &guid;
}

// --- buffer type --------------------------------------------------------------------------------

// By name: the versions of ggml differ in what members this structure has. Those left out are null.
const ggml_backend_buffer_type_i kBufferTypeInterface = [] {
  ggml_backend_buffer_type_i i = {};
  i.get_name = [](ggml_backend_buffer_type_t) { return kDeviceName; };
  i.alloc_buffer = [](ggml_backend_buffer_type_t buft, std::size_t size) {
    return Buffer::Alloc(buft, size);
  };
  // As the host's own type, and no more: when it keeps a sequence on the device, it sizes its
  // buffer by the tensors alone and aborts where the padding between more but shorter tensors does
  // not fit.
  i.get_alignment = [](ggml_backend_buffer_type_t) { return std::size_t{32}; };
  i.is_host = nullptr;  // else the host would put weights here
  return i;
}();

// --- device -------------------------------------------------------------------------------------

void GetMemory(ggml_backend_dev_t, std::size_t* free, std::size_t* total) {
  const double factor = ExpectedFactor();
  *total = static_cast<std::size_t>(static_cast<double>(SystemBytes("MemTotal:")) * factor);
  *free = static_cast<std::size_t>(static_cast<double>(SystemBytes("MemAvailable:")) * factor);
  *free = std::max<std::size_t>(*free, 1);
}

const char* Description(ggml_backend_dev_t) {
  static const std::string text = "compressed KV cache, version " KVTAMP_VERSION;
  return text.c_str();
}

void GetProps(ggml_backend_dev_t dev, ggml_backend_dev_props* props) {
  props->name = kDeviceName;
  props->description = Description(dev);
  props->type = GGML_BACKEND_DEVICE_TYPE_GPU;  // the only type that is given K and V
  props->device_id = nullptr;
  GetMemory(dev, &props->memory_free, &props->memory_total);
  props->caps = {};
  props->caps.mmap_support = true;  // false would turn mmap off for the whole model
}

ggml_backend_t InitBackend(ggml_backend_dev_t dev, const char*) {
  ReloadSettings();
  return new ggml_backend{Guid(), kBackendInterface, dev, new Backend};
}

const ggml_backend_device_i kDeviceInterface = {
    /* .get_name             = */ [](ggml_backend_dev_t) { return kDeviceName; },
    /* .get_description      = */ Description,
    /* .get_memory           = */ GetMemory,
    /* .get_type             = */ [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_GPU; },
    /* .get_props            = */ GetProps,
    /* .init_backend         = */ InitBackend,
    /* .get_buffer_type      = */ [](ggml_backend_dev_t) { return BufferType(); },
    /* .get_host_buffer_type = */ nullptr,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */
    [](ggml_backend_dev_t, const ggml_tensor* op) { return SupportsOp(op); },
    /* .supports_buft        = */
    [](ggml_backend_dev_t, ggml_backend_buffer_type_t buft) {
      return buft == BufferType() || ggml_backend_buft_is_host(buft);
    },
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ nullptr,
    /* .event_free           = */ nullptr,
    /* .event_synchronize    = */ nullptr,
};

// --- registration -------------------------------------------------------------------------------

ggml_backend_device* Device();

ggml_backend_feature* Features(ggml_backend_reg_t) {
  static std::string isa;
  isa = cpu::ActiveIsa();
  static ggml_backend_feature features[2] = {};
  features[0] = {"KERNELS", isa.c_str()};
  return features;
}

void* ProcAddress(ggml_backend_reg_t, const char* name) {
  if (std::strcmp(name, "ggml_backend_set_n_threads") == 0) {
    ggml_backend_set_n_threads_t fn = [](ggml_backend_t b, int n) { Of(b)->n_threads = n; };
    return reinterpret_cast<void*>(fn);
  }
  if (std::strcmp(name, "ggml_backend_set_abort_callback") == 0) {
    ggml_backend_set_abort_callback_t fn = [](ggml_backend_t b, ggml_abort_callback cb,
                                              void* data) {
      Of(b)->abort_callback = cb;
      Of(b)->abort_data = data;
    };
    return reinterpret_cast<void*>(fn);
  }
  if (std::strcmp(name, "ggml_backend_get_features") == 0)
    return reinterpret_cast<void*>(&Features);
  if (std::strcmp(name, "kvtamp_stats_json") == 0) return reinterpret_cast<void*>(&StatsJsonNow);
  return nullptr;
}

ggml_backend_reg* Registry() {
  static ggml_backend_reg reg = {
      GGML_BACKEND_API_VERSION,
      {
          /* .get_name         = */ [](ggml_backend_reg_t) { return kDeviceName; },
          /* .get_device_count = */ [](ggml_backend_reg_t) { return std::size_t{1}; },
          /* .get_device       = */
          [](ggml_backend_reg_t, std::size_t i) -> ggml_backend_dev_t {
            return i == 0 ? Device() : nullptr;
          },
          /* .get_proc_address = */ ProcAddress,
      },
      nullptr};
  return &reg;
}

ggml_backend_device* Device() {
  static ggml_backend_device device = {kDeviceInterface, Registry(), nullptr};
  return &device;
}

}  // namespace

std::shared_ptr<const control::Settings> CurrentSettings() {
  std::lock_guard lock(g_mutex);
  return g_settings;
}

void ReloadSettings() {
  std::shared_ptr<const control::Settings> fresh;
  std::string why;
  if (!LoadInto(fresh, why)) {
    Log(LogLevel::kError, why + "; the settings before stay in force");
    return;
  }
  std::lock_guard lock(g_mutex);
  g_settings = std::move(fresh);
}

ggml_backend_buffer_type_t BufferType() {
  static ggml_backend_buffer_type type = {kBufferTypeInterface, Device(), nullptr};
  return &type;
}

// True when this process had no ggml library before us. Then the program has a ggml of its own
// inside its binary, and we are linked to a second one that nobody uses.
bool GgmlCameWithUs() {
  Dl_info info;
  void *us = nullptr, *ggml = nullptr;
  if (dladdr1(&kDeviceInterface, &info, &us, RTLD_DL_LINKMAP) == 0 ||
      dladdr1(reinterpret_cast<const void*>(&ggml_version), &info, &ggml, RTLD_DL_LINKMAP) == 0)
    return false;
  const link_map* m = static_cast<const link_map*>(us);
  while (m != nullptr && m != ggml) m = m->l_next;  // in order of loading
  return m != nullptr;
}

// Not through the host's log: the host may be about to exit for want of our device, and exit() does
// not wait for the thread that writes the log.
bool Refuse(const std::string& why) {
  std::fprintf(stderr, "kvtamp: %s\n", why.c_str());
  return false;
}

// rpc-server offers what it finds instead of the CPU, and for its clients a device must compute
// whole models. It ends the process at the first op that one of its devices cannot.
bool InRpcServer() {
  std::error_code error;
  const std::string name =
      std::filesystem::read_symlink("/proc/self/exe", error).filename().string();
  return name.ends_with("rpc-server");
}

bool Start() {
  SetLogCallback(HostLog, nullptr);
  if (GgmlCameWithUs()) {
    return Refuse(
        "this program has ggml inside its own binary, which no plug-in can join; build "
        "llama.cpp with shared libraries (-DBUILD_SHARED_LIBS=ON)");
  }
  if (InRpcServer()) {
    return Refuse(
        "an RPC server computes whole models, and this device holds a cache only: the server "
        "goes on without it; unset GGML_BACKEND_PATH there, and use kvtamp at the client");
  }
  std::string note, why;
  if (Status s = CheckHostAbi(note); !s.ok()) return Refuse(s.message());
  std::shared_ptr<const control::Settings> settings;
  if (!LoadInto(settings, why)) return Refuse(why + " (the plug-in is not loaded)");
  {
    std::lock_guard lock(g_mutex);
    g_settings = std::move(settings);
  }
  if (!note.empty()) Log(LogLevel::kWarn, note);
  std::atexit(ReportAtExit);
  return true;
}

// Null refuses: the host goes on with its own cache. A host may ask again, with other settings, and
// the library may have stayed in memory meanwhile.
ggml_backend_reg_t Register() {
  static std::mutex mutex;
  static bool started = false;
  std::lock_guard lock(mutex);
  started = started || Start();
  return started ? Registry() : nullptr;
}

}  // namespace kvtamp::ggml_plugin

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() {
  return kvtamp::ggml_plugin::Register();
}
