// Put before every source of llama.cpp by scripts/fetch (-include), because of a bug of GCC that is
// in Debian 12's: its _tile_loadconfig tells the optimiser that it reads 8 bytes, not 64, so the
// stores that fill in the rest of the tile configuration are dropped, and the first AMX instruction
// of ggml-cpu dies with SIGILL. Right for every GCC, and empty where AMX is not compiled for.
#if defined(__AMX_TILE__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#undef _tile_loadconfig
#define _tile_loadconfig(config) \
  __asm__ volatile("ldtilecfg\t%0" : : "m"(*(const char(*)[64])(config)))
#endif
