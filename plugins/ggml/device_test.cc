// What the device says of itself, and which ops it takes.
#include <unistd.h>

#include "plugins/ggml/test_graph.h"

namespace kvtamp::ggml_plugin::test {
namespace {

TEST(Device, Facts) {
  ggml_backend_dev_t dev = Device();
  ASSERT_NE(dev, nullptr);
  ggml_backend_dev_props p = {};
  ggml_backend_dev_get_props(dev, &p);
  EXPECT_STREQ(p.name, "KVTAMP");
  EXPECT_STREQ(ggml_backend_dev_name(dev), "KVTAMP");
  EXPECT_NE(std::string(p.description), "");
  EXPECT_STREQ(ggml_backend_dev_description(dev), p.description);
  EXPECT_EQ(p.type, GGML_BACKEND_DEVICE_TYPE_GPU);
  EXPECT_EQ(ggml_backend_dev_type(dev), GGML_BACKEND_DEVICE_TYPE_GPU);
  EXPECT_EQ(p.device_id, nullptr);
  EXPECT_FALSE(p.caps.async);
  EXPECT_FALSE(p.caps.host_buffer);
  EXPECT_FALSE(p.caps.buffer_from_host_ptr);
  EXPECT_FALSE(p.caps.events);
  EXPECT_TRUE(p.caps.mmap_support);
  EXPECT_EQ(ggml_backend_dev_host_buffer_type(dev), nullptr);
  EXPECT_EQ(ggml_backend_dev_by_name("kvtamp"), dev);
}

TEST(Device, Memory) {
  NewBackend({"k4v4"});
  std::size_t free = 0, total = 0;
  ggml_backend_dev_memory(Device(), &free, &total);
  EXPECT_GT(free, 0u);
  EXPECT_LE(free, total);
  // What the memory holds once compressed; in f16 that is what there is.
  NewBackend({"f16"});
  std::size_t f16_free = 0, f16_total = 0;
  ggml_backend_dev_memory(Device(), &f16_free, &f16_total);
  EXPECT_GT(f16_free, 0u);
  EXPECT_LE(f16_free, f16_total);
  const auto system =
      static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
  EXPECT_NEAR(static_cast<double>(f16_total), system, 0.02 * system);
  EXPECT_GT(static_cast<double>(total), 2.5 * static_cast<double>(f16_total));
  EXPECT_LT(static_cast<double>(total), 4.0 * static_cast<double>(f16_total));
}

TEST(Device, LoadedAgainIsTheSame) {
  ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(Device());
  const std::size_t n_regs = ggml_backend_reg_count(), n_devs = ggml_backend_dev_count();
  EXPECT_EQ(Load(), reg);
  EXPECT_EQ(Load(), reg);
  EXPECT_EQ(ggml_backend_reg_by_name("KVTAMP"), reg);
  EXPECT_EQ(ggml_backend_reg_dev_count(reg), 1u);
  EXPECT_EQ(ggml_backend_reg_count(), n_regs);
  EXPECT_EQ(ggml_backend_dev_count(), n_devs);
}

TEST(Device, Procedures) {
  EXPECT_NE(Proc<ggml_backend_set_n_threads_t>(Device(), "ggml_backend_set_n_threads"), nullptr);
  EXPECT_NE(Proc<ggml_backend_set_abort_callback_t>(Device(), "ggml_backend_set_abort_callback"),
            nullptr);
  auto features = Proc<ggml_backend_get_features_t>(Device(), "ggml_backend_get_features");
  ASSERT_NE(features, nullptr);
  const ggml_backend_feature* f = features(ggml_backend_dev_backend_reg(Device()));
  ASSERT_NE(f, nullptr);
  ASSERT_NE(f[0].name, nullptr);
  EXPECT_STRNE(f[0].value, "");
  EXPECT_EQ(f[1].name, nullptr);
  // Those would make the host treat us as a weights device.
  EXPECT_EQ(Proc<void*>(Device(), "ggml_backend_dev_get_extra_bufts"), nullptr);
  EXPECT_EQ(Proc<void*>(Device(), "ggml_backend_split_buffer_type"), nullptr);
  EXPECT_EQ(Stats()["device"], "KVTAMP");
}

TEST(Device, BufferTypes) {
  ggml_backend_buffer_type_t buft = OurType();
  ASSERT_NE(buft, nullptr);
  EXPECT_STREQ(ggml_backend_buft_name(buft), "KVTAMP");
  EXPECT_FALSE(ggml_backend_buft_is_host(buft));
  EXPECT_EQ(ggml_backend_buft_get_device(buft), Device());
  EXPECT_TRUE(ggml_backend_dev_supports_buft(Device(), buft));
  EXPECT_TRUE(ggml_backend_dev_supports_buft(Device(), CpuType()));
  const ggml_backend_ptr b = NewBackend();
  EXPECT_EQ(ggml_backend_get_default_buffer_type(b.get()), buft);
  EXPECT_STREQ(ggml_backend_name(b.get()), "KVTAMP");
  const ggml_backend_buffer_ptr buffer(ggml_backend_buft_alloc_buffer(buft, 1000));
  ASSERT_NE(buffer, nullptr);
  EXPECT_EQ(ggml_backend_buffer_get_size(buffer.get()), 1000u);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(ggml_backend_buffer_get_base(buffer.get())) %
                ggml_backend_buft_get_alignment(buft),
            0u);
  EXPECT_FALSE(ggml_backend_buffer_is_host(buffer.get()));
  // More than the host's own would make it abort when it keeps sequences on the device.
  EXPECT_EQ(ggml_backend_buft_get_alignment(buft), ggml_backend_buft_get_alignment(CpuType()));
}

// A wrong setting is told when a context starts; the settings before stay in force.
TEST(Device, BadSettingKeepsTheOldOnes) {
  NewBackend({"k8v8", 32});
  setenv("KVTAMP_CACHE_TYPE", "k5v99", 1);
  const ggml_backend_ptr b(ggml_backend_dev_init(Device(), nullptr));
  EXPECT_NE(b, nullptr);
  EXPECT_EQ(Stats()["type"], "k8v8");
  EXPECT_EQ(Stats()["page_size"], 32);
  setenv("KVTAMP_CACHE_TYPE", "f16", 1);
}

// --- supports_op --------------------------------------------------------------------------------

class SupportsOp : public ::testing::Test {
 protected:
  // A tensor in a buffer of size 0, as the host makes them when it only measures.
  ggml_tensor* In(ggml_backend_buffer_t buffer, ggml_type type,
                  std::initializer_list<std::int64_t> ne) {
    ggml_tensor* t = ggml_new_tensor(c, type, static_cast<int>(ne.size()), ne.begin());
    t->buffer = buffer;
    return t;
  }
  ggml_tensor* Ours(ggml_type type, std::initializer_list<std::int64_t> ne) {
    return In(dummy.get(), type, ne);
  }
  ggml_tensor* Host(ggml_type type, std::initializer_list<std::int64_t> ne) {
    return In(host.get(), type, ne);
  }
  ggml_tensor* Free(ggml_type type, std::initializer_list<std::int64_t> ne) {
    return In(nullptr, type, ne);
  }

  bool Takes(const ggml_tensor* op) { return ggml_backend_dev_supports_op(Device(), op); }

  ggml_context_ptr ctx = NewContext();
  ggml_context* c = ctx.get();
  ggml_backend_buffer_ptr dummy{ggml_backend_buft_alloc_buffer(OurType(), 0)};
  ggml_backend_buffer_ptr host{ggml_backend_buft_alloc_buffer(CpuType(), 0)};
  static constexpr ggml_type F32 = GGML_TYPE_F32, F16 = GGML_TYPE_F16, I32 = GGML_TYPE_I32,
                             I64 = GGML_TYPE_I64;
};

TEST_F(SupportsOp, ViewsAndLeafsAlways) {
  for (ggml_backend_buffer_t b :
       {dummy.get(), host.get(), static_cast<ggml_backend_buffer_t>(nullptr)}) {
    ggml_tensor* t = In(b, F32, {64, 32});
    EXPECT_TRUE(Takes(t));
    EXPECT_TRUE(Takes(ggml_view_1d(c, t, 64, 64)));
    EXPECT_TRUE(Takes(ggml_reshape_1d(c, t, 64 * 32)));
    EXPECT_TRUE(Takes(ggml_permute(c, t, 1, 0, 2, 3)));
    EXPECT_TRUE(Takes(ggml_transpose(c, t)));
  }
}

TEST_F(SupportsOp, WhateverLandsInOurBuffers) {
  ggml_tensor* k = Ours(F16, {128, 256, 2});
  ggml_set_name(k, "cache_k_l0");
  ggml_tensor* k2d = ggml_reshape_2d(c, k, 128, 512);
  EXPECT_TRUE(Takes(ggml_set_rows(c, k2d, Free(F32, {128, 4}), Free(I64, {4}))));
  // V transposed, a row a single element.
  ggml_tensor* v = Ours(F16, {128, 256});
  ggml_set_name(v, "cache_v_l0");
  EXPECT_TRUE(Takes(
      ggml_set_rows(c, ggml_reshape_2d(c, v, 1, 128 * 256), Free(F32, {1, 8}), Free(I64, {8}))));
  ggml_tensor* heads = ggml_view_3d(c, k, 64, 2, 512, 128, 256, 0);
  EXPECT_TRUE(Takes(ggml_rope_ext_inplace(c, heads, Free(I32, {512}), nullptr, 64, 0, 2048, 1e4f, 1,
                                          0, 1, 32, 1)));
  ggml_tensor* state = Ours(F32, {64, 8});
  EXPECT_TRUE(Takes(ggml_scale_inplace(c, state, 0)));
  EXPECT_TRUE(Takes(ggml_cpy(c, Free(F32, {64}), ggml_view_1d(c, state, 64, 0))));
  EXPECT_TRUE(Takes(ggml_cpy(c, Free(F32, {128, 512}), k2d)));
  EXPECT_TRUE(Takes(ggml_add_inplace(c, state, Free(F32, {64, 8}))));
}

TEST_F(SupportsOp, AttentionOverOurCacheOnly) {
  auto attention = [&](ggml_backend_buffer_t kb, ggml_backend_buffer_t vb) {
    ggml_tensor *k = In(kb, F16, {128, 256}), *v = In(vb, F16, {128, 256});
    return ggml_flash_attn_ext(
        c, Free(F32, {64, 5, 4}), ggml_view_3d(c, k, 64, 256, 2, 256, 128, 0),
        ggml_view_3d(c, v, 64, 256, 2, 256, 128, 0), Free(F16, {256, 5}), 1, 0, 0);
  };
  EXPECT_TRUE(Takes(attention(dummy.get(), dummy.get())));
  EXPECT_FALSE(Takes(attention(host.get(), host.get())));
  EXPECT_FALSE(Takes(attention(nullptr, nullptr)));
  EXPECT_FALSE(Takes(attention(dummy.get(), host.get())));
  EXPECT_FALSE(Takes(attention(nullptr, dummy.get())));
}

// Where the host may put its weights: it asks with each in a buffer of ours.
TEST_F(SupportsOp, NoWeights) {
  ggml_tensor* w = Ours(GGML_TYPE_Q4_0, {256, 64});
  EXPECT_FALSE(Takes(ggml_mul_mat(c, w, Free(F32, {256, 8}))));
  EXPECT_FALSE(Takes(ggml_get_rows(c, w, Free(I32, {8}))));
  EXPECT_FALSE(Takes(ggml_mul_mat_id(c, Ours(GGML_TYPE_Q4_0, {256, 64, 4}), Free(F32, {256, 2, 8}),
                                     Free(I32, {2, 8}))));
  EXPECT_FALSE(Takes(ggml_add(c, Free(F32, {256, 8}), Ours(F32, {256}))));
  EXPECT_FALSE(
      Takes(ggml_add_id(c, Free(F32, {256, 2, 8}), Ours(F32, {256, 4}), Free(I32, {2, 8}))));
  EXPECT_FALSE(Takes(ggml_mul(c, Free(F32, {256, 8}), Ours(F32, {256}))));
  EXPECT_FALSE(Takes(ggml_div(c, Free(F32, {256, 8}), Ours(F32, {256}))));
  EXPECT_FALSE(Takes(ggml_rope_ext(c, Free(F32, {64, 4, 8}), Free(I32, {8}), Ours(F32, {32}), 64, 0,
                                   2048, 1e4f, 1, 0, 1, 32, 1)));
  EXPECT_FALSE(Takes(ggml_ssm_conv(c, Free(F32, {11, 64, 1}), Ours(F32, {4, 64}))));
  EXPECT_FALSE(Takes(ggml_im2col(c, Ours(F16, {3, 64, 8}), Free(F32, {32, 64, 1, 1}), 1, 0, 0, 0, 1,
                                 0, false, F16)));
  EXPECT_FALSE(Takes(ggml_scale(c, Ours(F32, {64, 8}), 2)));
  ggml_tensor* s = Free(F32, {16, 8, 4, 2});
  EXPECT_FALSE(
      Takes(ggml_ssm_scan(c, s, Free(F32, {8, 4, 3, 2}), Free(F32, {4, 3, 2}), Ours(F32, {16, 4}),
                          Free(F32, {16, 1, 3, 2}), Free(F32, {16, 1, 3, 2}), Free(I32, {2}), 1)));
}

TEST_F(SupportsOp, NothingOfOthers) {
  for (ggml_backend_buffer_t b : {host.get(), static_cast<ggml_backend_buffer_t>(nullptr)}) {
    ggml_tensor* x = In(b, F32, {64, 8});
    EXPECT_FALSE(Takes(ggml_add(c, x, x)));
    EXPECT_FALSE(Takes(ggml_mul(c, x, x)));
    EXPECT_FALSE(Takes(ggml_scale(c, x, 2)));
    EXPECT_FALSE(Takes(ggml_norm(c, x, 1e-5f)));
    EXPECT_FALSE(Takes(ggml_rms_norm(c, x, 1e-5f)));
    EXPECT_FALSE(Takes(ggml_soft_max(c, x)));
    EXPECT_FALSE(Takes(ggml_cpy(c, x, In(b, F16, {64, 8}))));
    EXPECT_FALSE(Takes(ggml_cont(c, ggml_transpose(c, x))));
    EXPECT_FALSE(Takes(ggml_mul_mat(c, x, x)));
    EXPECT_FALSE(Takes(ggml_get_rows(c, x, In(b, I32, {4}))));
    EXPECT_FALSE(Takes(ggml_rope(c, In(b, F32, {64, 4, 8}), In(b, I32, {8}), 64, 0)));
    // A mask filled by rows (sparse attention does).
    EXPECT_FALSE(Takes(ggml_set_rows(c, In(b, F16, {64, 8}), x, In(b, I64, {8}))));
  }
}

// For the host's test-backend-ops, which asks before its tensors have memory.
TEST_F(SupportsOp, AllOfThreeOpsWhenToldSo) {
  ggml_tensor* x = Free(F32, {64, 8});
  ggml_tensor* ops[] = {ggml_set_rows(c, Free(F16, {64, 8}), x, Free(I64, {8})),
                        ggml_flash_attn_ext(c, Free(F32, {64, 5, 4}), Free(F16, {64, 256, 2}),
                                            Free(F16, {64, 256, 2}), Free(F16, {256, 5}), 1, 0, 0),
                        ggml_rope(c, Free(F32, {64, 4, 8}), Free(I32, {8}), 64, 0)};
  setenv("KVTAMP_DEBUG_ACCEPT_OPS", "1", 1);
  NewBackend();
  for (const ggml_tensor* op : ops) EXPECT_TRUE(Takes(op)) << ggml_op_name(op->op);
  EXPECT_FALSE(Takes(ggml_add(c, x, x)));
  unsetenv("KVTAMP_DEBUG_ACCEPT_OPS");
  NewBackend();
  for (const ggml_tensor* op : ops) EXPECT_FALSE(Takes(op)) << ggml_op_name(op->op);
}

// Recurrent state is read in place, or the CPU would copy all of it for every token.
TEST_F(SupportsOp, ReadsOfRecurrentState) {
  const ggml_context_ptr own = NewContext(8);
  ggml_tensor* r = ggml_new_tensor_2d(own.get(), F32, 64, 4);
  ggml_set_name(r, "cache_r_l0");
  const ggml_backend_buffer_ptr buffer(
      ggml_backend_alloc_ctx_tensors_from_buft(own.get(), OurType()));
  EXPECT_TRUE(Takes(ggml_get_rows(c, r, Free(I32, {2}))));
  EXPECT_FALSE(Takes(ggml_mul_mat(c, r, Free(F32, {64, 2}))));
  ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
  EXPECT_FALSE(Takes(ggml_get_rows(c, r, Free(I32, {2}))));
}

// The answer for a measured cache must be that for the real one, or the host's plan falls apart.
TEST_F(SupportsOp, SameForDummyAndRealCache) {
  const Cache real(OurType(), {.n_head_kv = 2, .n_cells = 256});
  ggml_tensor *dk = Ours(F16, {128, 256}), *dv = Ours(F16, {128, 256});
  ggml_set_name(dk, "cache_k_l0");
  ggml_set_name(dv, "cache_v_l0");
  auto answers = [&](ggml_tensor* k, ggml_tensor* v) {
    k = ggml_reshape_2d(c, k, 128, 256);
    v = ggml_reshape_2d(c, v, 128, 256);
    ggml_tensor* heads = ggml_view_3d(c, k, 64, 256, 2, 256, 128, 0);
    return std::vector<bool>{
        Takes(ggml_set_rows(c, k, Free(F32, {128, 4}), Free(I64, {4}))),
        Takes(ggml_flash_attn_ext(c, Free(F32, {64, 5, 4}), heads,
                                  ggml_view_3d(c, v, 64, 256, 2, 256, 128, 0), Free(F16, {256, 5}),
                                  1, 0, 0)),
        Takes(ggml_mul_mat(c, heads, Free(F32, {64, 5, 4}))),
        Takes(ggml_get_rows(c, k, Free(I32, {3}))),
        Takes(ggml_cpy(c, Free(F32, {128, 256}), k)),
        Takes(ggml_cpy(c, k, Free(F32, {128, 256}))),
        Takes(ggml_cont(c, ggml_transpose(c, v))),
    };
  };
  EXPECT_EQ(answers(real.k[0], real.v[0]), answers(dk, dv));
}

}  // namespace
}  // namespace kvtamp::ggml_plugin::test
