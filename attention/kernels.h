// The two ways through a unit, on the instruction set in force (Highway's dynamic dispatch).
#pragma once

#include "attention/unit.h"

namespace kvtamp::attention {

// Query rows that fill the vectors of the prefill path once: blocks are multiples of it.
std::uint32_t PrefillLanes();

std::size_t DecodeScratch(const Layer& layer, std::uint32_t rows);
std::size_t PrefillScratch(const Layer& layer, std::uint32_t rows);

// Both fill all rows of `result`.
void RunDecode(const Unit& unit, std::uint8_t* scratch, float* result);
void RunPrefill(const Unit& unit, std::uint8_t* scratch, float* result);

// Bounds of the unit's rows for its pages: row r's of page p at bounds[r * stride + p]. Scratch as
// for RunDecode.
void RunBounds(const Unit& unit, std::uint8_t* scratch, float* bounds, std::size_t stride);

// Adds the softmax weights of the unit's rows to mass[cell]. slots: rows of its pages, each rounded
// up to 16; scores: [rows][slots] scratch, the other as for RunDecode.
void RunObserve(const Unit& unit, std::uint8_t* scratch, float* scores, std::size_t slots,
                float* mass);

// Folds the row's n partial results, `stride` floats apart, and a sink (null: none) into one and
// writes out[dim_v]. Changes the first partial.
void Finish(float* partials, std::size_t stride, std::uint32_t n, const float* sink,
            std::uint32_t dim_v, float* out);

// The stages of decode on one page, for tests: scales as floats, then K folded into q and the dot
// products, V folded into p and the weighted sums. Every instruction set must give the same
// integers.
struct IntegerStage {
  float step = 0;               // of the folded vector
  std::int32_t sum = 0;         // K: of the folded q
  std::int32_t* out = nullptr;  // K: [rows]; V: [dim rounded up to 16]
};
void Grid(codec::Coding coding, const codec::PageShape& shape, const std::uint8_t* page,
          float* scale,
          float* centre);  // K: [dim up to 16] each; V: scale[dim / group, rows]
void KIntegers(codec::Coding coding, const codec::PageShape& shape, const std::uint8_t* page,
               const float* q, IntegerStage& stage);
void VIntegers(codec::Coding coding, const codec::PageShape& shape, const std::uint8_t* page,
               std::uint32_t first_channel, const float* p, IntegerStage& stage);

}  // namespace kvtamp::attention
