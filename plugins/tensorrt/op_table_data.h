// Made by `python -m flashnext.plugins.tensorrt.table` from the op table and the kernels' params.h.
#pragma once

#include <cstddef>

#include "gated_delta_net/params.h"
#include "gated_residual/params.h"
#include "ngram_injection/params.h"
#include "sparse_attention/params.h"
#include "sparse_moe/params.h"
#include "tensorrt/op_table.h"

#define FLASHNEXT_OP_VERSION 1
#define FLASHNEXT_PLUGIN_VERSION "1"
#define FLASHNEXT_PLUGIN_NAMESPACE ""
#define FLASHNEXT_OP_TABLE "2059935eecbb03a7"

namespace flashnext::trt {

inline constexpr int kOpVersion = FLASHNEXT_OP_VERSION;
inline constexpr char kTableDigest[] = FLASHNEXT_OP_TABLE;

namespace gated_residual_op {

inline constexpr const char* kSizes[] = {"B", "S", "H", "n", "rank"};
inline constexpr Code kCode[] = {
    {Step::size, 0}, {Step::end, 0},  // B
    {Step::size, 1}, {Step::end, 0},  // S
    {Step::size, 2}, {Step::end, 0},  // H
    {Step::size, 3}, {Step::size, 2}, {Step::multiply, 0}, {Step::end, 0},  // n*H
    {Step::size, 4}, {Step::end, 0},  // rank
    {Step::size, 3}, {Step::end, 0},  // n
    {Step::size, 0}, {Step::size, 1}, {Step::multiply, 0}, {Step::end, 0},  // B*S
};
inline constexpr AttributeRow kAttributes[] = {
    {"branches", Kind::integer, 3, -1, {}},
    {"eps", Kind::number, -1, offsetof(GatedResidualParams, eps), {}},
};
inline constexpr Combination kCombinations[] = {{0, 0}, {1, 1}};
inline constexpr PortRow kEmbedInputs[] = {
    {"embedding", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, embedding), -1},  // [B, S, H]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
};
inline constexpr PortRow kEmbedOutputs[] = {
    {"r_out", {0, 0}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
};
inline constexpr SizeField kEmbedSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kEmbedFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {0, 0}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kPendingInputs[] = {
    {"r", {0, 0}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r), -1},  // [B, S, n, H]
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, y), -1},  // [B, S, H]
    {"s", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s), -1},  // [B, S, n]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
};
inline constexpr PortRow kPendingOutputs[] = {
    {"r_out", {0, 0}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
};
inline constexpr SizeField kPendingSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kPendingFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {0, 0}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kSettledInputs[] = {
    {"r", {0, 0}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r), -1},  // [B, S, n, H]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
};
inline constexpr PortRow kSettledOutputs[] = {
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
};
inline constexpr SizeField kSettledSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kSettledFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {0, 0}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kLastInputs[] = {
    {"r", {0, 0}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r), -1},  // [B, S, n, H]
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, y), -1},  // [B, S, H]
    {"s", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s), -1},  // [B, S, n]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
};
inline constexpr PortRow kLastOutputs[] = {
    {"r_out", {0, 0}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
};
inline constexpr SizeField kLastSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kLastFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {0, 0}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kEmbedFp8StaticInputs[] = {
    {"embedding", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, embedding), -1},  // [B, S, H]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
    {"r_out_scale", {-1, 0}, 1, {12}, offsetof(GatedResidualParams, r_out_scale), -1},  // [n]
};
inline constexpr PortRow kEmbedFp8StaticOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
};
inline constexpr SizeField kEmbedFp8StaticSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kEmbedFp8StaticFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kEmbedFp8DynamicInputs[] = {
    {"embedding", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, embedding), -1},  // [B, S, H]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
};
inline constexpr PortRow kEmbedFp8DynamicOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
    {"r_out_token_scale", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, r_out_token_scale), -1},  // [B, S, n]
};
inline constexpr SizeField kEmbedFp8DynamicSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kEmbedFp8DynamicFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kPendingFp8StaticInputs[] = {
    {"r", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r), -1},  // [B, S, n, H]
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, y), -1},  // [B, S, H]
    {"s", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s), -1},  // [B, S, n]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
    {"r_scale", {-1, 0}, 1, {12}, offsetof(GatedResidualParams, r_scale), -1},  // [n]
    {"r_out_scale", {-1, 0}, 1, {12}, offsetof(GatedResidualParams, r_out_scale), -1},  // [n]
};
inline constexpr PortRow kPendingFp8StaticOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
};
inline constexpr SizeField kPendingFp8StaticSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kPendingFp8StaticFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kPendingFp8DynamicInputs[] = {
    {"r", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r), -1},  // [B, S, n, H]
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, y), -1},  // [B, S, H]
    {"s", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s), -1},  // [B, S, n]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
    {"r_token_scale", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, r_token_scale), -1},  // [B, S, n]
};
inline constexpr PortRow kPendingFp8DynamicOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
    {"r_out_token_scale", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, r_out_token_scale), -1},  // [B, S, n]
};
inline constexpr SizeField kPendingFp8DynamicSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kPendingFp8DynamicFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kSettledFp8StaticInputs[] = {
    {"r", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r), -1},  // [B, S, n, H]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
    {"r_scale", {-1, 0}, 1, {12}, offsetof(GatedResidualParams, r_scale), -1},  // [n]
};
inline constexpr PortRow kSettledFp8StaticOutputs[] = {
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
};
inline constexpr SizeField kSettledFp8StaticSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kSettledFp8StaticFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kSettledFp8DynamicInputs[] = {
    {"r", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r), -1},  // [B, S, n, H]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
    {"r_token_scale", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, r_token_scale), -1},  // [B, S, n]
};
inline constexpr PortRow kSettledFp8DynamicOutputs[] = {
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
};
inline constexpr SizeField kSettledFp8DynamicSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kSettledFp8DynamicFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kLastFp8StaticInputs[] = {
    {"r", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r), -1},  // [B, S, n, H]
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, y), -1},  // [B, S, H]
    {"s", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s), -1},  // [B, S, n]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"r_scale", {-1, 0}, 1, {12}, offsetof(GatedResidualParams, r_scale), -1},  // [n]
    {"r_out_scale", {-1, 0}, 1, {12}, offsetof(GatedResidualParams, r_out_scale), -1},  // [n]
};
inline constexpr PortRow kLastFp8StaticOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
};
inline constexpr SizeField kLastFp8StaticSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kLastFp8StaticFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kLastFp8DynamicInputs[] = {
    {"r", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r), -1},  // [B, S, n, H]
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, y), -1},  // [B, S, H]
    {"s", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s), -1},  // [B, S, n]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"r_token_scale", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, r_token_scale), -1},  // [B, S, n]
};
inline constexpr PortRow kLastFp8DynamicOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"r_out_token_scale", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, r_out_token_scale), -1},  // [B, S, n]
};
inline constexpr SizeField kLastFp8DynamicSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kLastFp8DynamicFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kStartFp8StaticInputs[] = {
    {"start", {0, 0}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, start), -1},  // [B, S, n, H]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
    {"r_out_scale", {-1, 0}, 1, {12}, offsetof(GatedResidualParams, r_out_scale), -1},  // [n]
};
inline constexpr PortRow kStartFp8StaticOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
};
inline constexpr SizeField kStartFp8StaticSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kStartFp8StaticFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr PortRow kStartFp8DynamicInputs[] = {
    {"start", {0, 0}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, start), -1},  // [B, S, n, H]
    {"norm_weight", {0, 0}, 1, {6}, offsetof(GatedResidualParams, norm_weight), -1},  // [n*H]
    {"down_weight", {0, 0}, 2, {10, 6}, offsetof(GatedResidualParams, down_weight), -1},  // [rank, n*H]
    {"up_weight", {0, 0}, 2, {6, 10}, offsetof(GatedResidualParams, up_weight), -1},  // [n*H, rank]
    {"inject_weight", {0, 0}, 2, {12, 6}, offsetof(GatedResidualParams, inject_weight), -1},  // [n, n*H]
};
inline constexpr PortRow kStartFp8DynamicOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 12, 4}, offsetof(GatedResidualParams, r_out), -1},  // [B, S, n, H]
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(GatedResidualParams, x), -1},  // [B, S, H]
    {"s_out", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, s_out), -1},  // [B, S, n]
    {"r_out_token_scale", {-1, 0}, 3, {0, 2, 12}, offsetof(GatedResidualParams, r_out_token_scale), -1},  // [B, S, n]
};
inline constexpr SizeField kStartFp8DynamicSizes[] = {
    {offsetof(GatedResidualParams, tokens), 14},  // tokens = B*S
    {offsetof(GatedResidualParams, branches), 12},  // branches = n
    {offsetof(GatedResidualParams, hidden), 4},  // hidden = H
    {offsetof(GatedResidualParams, rank), 10},  // rank = rank
};
inline constexpr FormatField kStartFp8DynamicFormats[] = {
    {offsetof(GatedResidualParams, T), {0, 0}},
    {offsetof(GatedResidualParams, R), {-1, 3}},
    {offsetof(GatedResidualParams, W), {0, 0}},
};
inline constexpr FormRow kForms[] = {
    {"embed", kEmbedInputs, kEmbedOutputs, kEmbedSizes, kEmbedFormats, {}},
    {"pending", kPendingInputs, kPendingOutputs, kPendingSizes, kPendingFormats, {}},
    {"settled", kSettledInputs, kSettledOutputs, kSettledSizes, kSettledFormats, {}},
    {"last", kLastInputs, kLastOutputs, kLastSizes, kLastFormats, {}},
    {"embed_fp8_static", kEmbedFp8StaticInputs, kEmbedFp8StaticOutputs, kEmbedFp8StaticSizes, kEmbedFp8StaticFormats, {}},
    {"embed_fp8_dynamic", kEmbedFp8DynamicInputs, kEmbedFp8DynamicOutputs, kEmbedFp8DynamicSizes, kEmbedFp8DynamicFormats, {}},
    {"pending_fp8_static", kPendingFp8StaticInputs, kPendingFp8StaticOutputs, kPendingFp8StaticSizes, kPendingFp8StaticFormats, {}},
    {"pending_fp8_dynamic", kPendingFp8DynamicInputs, kPendingFp8DynamicOutputs, kPendingFp8DynamicSizes, kPendingFp8DynamicFormats, {}},
    {"settled_fp8_static", kSettledFp8StaticInputs, kSettledFp8StaticOutputs, kSettledFp8StaticSizes, kSettledFp8StaticFormats, {}},
    {"settled_fp8_dynamic", kSettledFp8DynamicInputs, kSettledFp8DynamicOutputs, kSettledFp8DynamicSizes, kSettledFp8DynamicFormats, {}},
    {"last_fp8_static", kLastFp8StaticInputs, kLastFp8StaticOutputs, kLastFp8StaticSizes, kLastFp8StaticFormats, {}},
    {"last_fp8_dynamic", kLastFp8DynamicInputs, kLastFp8DynamicOutputs, kLastFp8DynamicSizes, kLastFp8DynamicFormats, {}},
    {"start_fp8_static", kStartFp8StaticInputs, kStartFp8StaticOutputs, kStartFp8StaticSizes, kStartFp8StaticFormats, {}},
    {"start_fp8_dynamic", kStartFp8DynamicInputs, kStartFp8DynamicOutputs, kStartFp8DynamicSizes, kStartFp8DynamicFormats, {}},
};
inline constexpr OpRow kOp = {"GatedResidual", "gated_residual", kSizes, kCode, kAttributes,
                               kCombinations, kForms, sizeof(GatedResidualParams),
                               offsetof(GatedResidualParams, workspace), offsetof(GatedResidualParams, stream),
                               -1, -1};

}  // namespace gated_residual_op

namespace ngram_injection_op {

inline constexpr const char* kSizes[] = {"B", "S", "H", "n", "width", "P", "Q"};
inline constexpr Code kCode[] = {
    {Step::size, 0}, {Step::end, 0},  // B
    {Step::size, 1}, {Step::end, 0},  // S
    {Step::size, 2}, {Step::end, 0},  // H
    {Step::size, 3}, {Step::size, 2}, {Step::multiply, 0}, {Step::end, 0},  // n*H
    {Step::constant, 1}, {Step::end, 0},  // 1
    {Step::size, 4}, {Step::end, 0},  // width
    {Step::size, 5}, {Step::end, 0},  // P
    {Step::size, 6}, {Step::end, 0},  // Q
    {Step::size, 3}, {Step::end, 0},  // n
    {Step::constant, 0}, {Step::end, 0},  // 0
    {Step::size, 5}, {Step::constant, -1}, {Step::add, 0}, {Step::end, 0},  // P+-1
    {Step::constant, 16777216}, {Step::end, 0},  // 16777216
};
inline constexpr AttributeRow kAttributes[] = {
    {"branches", Kind::integer, 3, -1, {}},
    {"eps", Kind::number, -1, offsetof(NgramInjectionParams, eps), {}},
    {"dilation", Kind::integer, -1, offsetof(NgramInjectionParams, dilation), {}},
};
inline constexpr Combination kCombinations[] = {{0, 0}, {1, 1}};
inline constexpr PortRow kEmbedInputs[] = {
    {"embedding", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, embedding), -1},  // [B, S, H]
    {"key", {0, 0}, 3, {0, 2, 6}, offsetof(NgramInjectionParams, key), -1},  // [B, S, n*H]
    {"value", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, value), -1},  // [B, S, H]
    {"norm_key_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_key_weight), -1},  // [n*H]
    {"norm_query_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_query_weight), -1},  // [n*H]
    {"norm_conv_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_conv_weight), -1},  // [n*H]
    {"conv_weight", {0, 0}, 3, {6, 10, 12}, offsetof(NgramInjectionParams, conv_weight), -1},  // [n*H, 1, width]
    {"slots", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, new_len), -1},  // [B]
    {"conv_state", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), -1},  // [P, Q, n*H]
};
inline constexpr PortRow kEmbedOutputs[] = {
    {"r_out", {0, 0}, 4, {0, 2, 18, 4}, offsetof(NgramInjectionParams, r_out), -1},  // [B, S, n, H]
    {"conv_state_out", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), 10},  // [P, Q, n*H]
};
inline constexpr SizeField kEmbedSizes[] = {
    {offsetof(NgramInjectionParams, batch), 0},  // batch = B
    {offsetof(NgramInjectionParams, steps), 2},  // steps = S
    {offsetof(NgramInjectionParams, branches), 18},  // branches = n
    {offsetof(NgramInjectionParams, hidden), 4},  // hidden = H
    {offsetof(NgramInjectionParams, width), 12},  // width = width
    {offsetof(NgramInjectionParams, rows), 14},  // rows = P
    {offsetof(NgramInjectionParams, ring), 16},  // ring = Q
};
inline constexpr FormatField kEmbedFormats[] = {
    {offsetof(NgramInjectionParams, T), {0, 0}},
    {offsetof(NgramInjectionParams, R), {0, 0}},
};
inline constexpr BoundRow kEmbedBounds[] = {
    {7, 20, 22, -1, 0},  // slots
    {8, 20, 26, -1, 0},  // past_len
    {9, 20, 2, -1, 0},  // new_len
};
inline constexpr PortRow kPendingInputs[] = {
    {"r", {0, 0}, 4, {0, 2, 18, 4}, offsetof(NgramInjectionParams, r), -1},  // [B, S, n, H]
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, y), -1},  // [B, S, H]
    {"s", {-1, 0}, 3, {0, 2, 18}, offsetof(NgramInjectionParams, s), -1},  // [B, S, n]
    {"key", {0, 0}, 3, {0, 2, 6}, offsetof(NgramInjectionParams, key), -1},  // [B, S, n*H]
    {"value", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, value), -1},  // [B, S, H]
    {"norm_key_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_key_weight), -1},  // [n*H]
    {"norm_query_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_query_weight), -1},  // [n*H]
    {"norm_conv_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_conv_weight), -1},  // [n*H]
    {"conv_weight", {0, 0}, 3, {6, 10, 12}, offsetof(NgramInjectionParams, conv_weight), -1},  // [n*H, 1, width]
    {"slots", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, new_len), -1},  // [B]
    {"conv_state", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), -1},  // [P, Q, n*H]
};
inline constexpr PortRow kPendingOutputs[] = {
    {"r_out", {0, 0}, 4, {0, 2, 18, 4}, offsetof(NgramInjectionParams, r_out), -1},  // [B, S, n, H]
    {"conv_state_out", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), 12},  // [P, Q, n*H]
};
inline constexpr SizeField kPendingSizes[] = {
    {offsetof(NgramInjectionParams, batch), 0},  // batch = B
    {offsetof(NgramInjectionParams, steps), 2},  // steps = S
    {offsetof(NgramInjectionParams, branches), 18},  // branches = n
    {offsetof(NgramInjectionParams, hidden), 4},  // hidden = H
    {offsetof(NgramInjectionParams, width), 12},  // width = width
    {offsetof(NgramInjectionParams, rows), 14},  // rows = P
    {offsetof(NgramInjectionParams, ring), 16},  // ring = Q
};
inline constexpr FormatField kPendingFormats[] = {
    {offsetof(NgramInjectionParams, T), {0, 0}},
    {offsetof(NgramInjectionParams, R), {0, 0}},
};
inline constexpr BoundRow kPendingBounds[] = {
    {9, 20, 22, -1, 0},  // slots
    {10, 20, 26, -1, 0},  // past_len
    {11, 20, 2, -1, 0},  // new_len
};
inline constexpr PortRow kEmbedFp8StaticInputs[] = {
    {"embedding", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, embedding), -1},  // [B, S, H]
    {"key", {0, 0}, 3, {0, 2, 6}, offsetof(NgramInjectionParams, key), -1},  // [B, S, n*H]
    {"value", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, value), -1},  // [B, S, H]
    {"norm_key_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_key_weight), -1},  // [n*H]
    {"norm_query_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_query_weight), -1},  // [n*H]
    {"norm_conv_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_conv_weight), -1},  // [n*H]
    {"conv_weight", {0, 0}, 3, {6, 10, 12}, offsetof(NgramInjectionParams, conv_weight), -1},  // [n*H, 1, width]
    {"slots", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, new_len), -1},  // [B]
    {"conv_state", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), -1},  // [P, Q, n*H]
    {"r_out_scale", {-1, 0}, 1, {18}, offsetof(NgramInjectionParams, r_out_scale), -1},  // [n]
};
inline constexpr PortRow kEmbedFp8StaticOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 18, 4}, offsetof(NgramInjectionParams, r_out), -1},  // [B, S, n, H]
    {"conv_state_out", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), 10},  // [P, Q, n*H]
};
inline constexpr SizeField kEmbedFp8StaticSizes[] = {
    {offsetof(NgramInjectionParams, batch), 0},  // batch = B
    {offsetof(NgramInjectionParams, steps), 2},  // steps = S
    {offsetof(NgramInjectionParams, branches), 18},  // branches = n
    {offsetof(NgramInjectionParams, hidden), 4},  // hidden = H
    {offsetof(NgramInjectionParams, width), 12},  // width = width
    {offsetof(NgramInjectionParams, rows), 14},  // rows = P
    {offsetof(NgramInjectionParams, ring), 16},  // ring = Q
};
inline constexpr FormatField kEmbedFp8StaticFormats[] = {
    {offsetof(NgramInjectionParams, T), {0, 0}},
    {offsetof(NgramInjectionParams, R), {-1, 3}},
};
inline constexpr BoundRow kEmbedFp8StaticBounds[] = {
    {7, 20, 22, -1, 0},  // slots
    {8, 20, 26, -1, 0},  // past_len
    {9, 20, 2, -1, 0},  // new_len
};
inline constexpr PortRow kEmbedFp8DynamicInputs[] = {
    {"embedding", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, embedding), -1},  // [B, S, H]
    {"key", {0, 0}, 3, {0, 2, 6}, offsetof(NgramInjectionParams, key), -1},  // [B, S, n*H]
    {"value", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, value), -1},  // [B, S, H]
    {"norm_key_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_key_weight), -1},  // [n*H]
    {"norm_query_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_query_weight), -1},  // [n*H]
    {"norm_conv_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_conv_weight), -1},  // [n*H]
    {"conv_weight", {0, 0}, 3, {6, 10, 12}, offsetof(NgramInjectionParams, conv_weight), -1},  // [n*H, 1, width]
    {"slots", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, new_len), -1},  // [B]
    {"conv_state", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), -1},  // [P, Q, n*H]
};
inline constexpr PortRow kEmbedFp8DynamicOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 18, 4}, offsetof(NgramInjectionParams, r_out), -1},  // [B, S, n, H]
    {"conv_state_out", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), 10},  // [P, Q, n*H]
    {"r_out_token_scale", {-1, 0}, 3, {0, 2, 18}, offsetof(NgramInjectionParams, r_out_token_scale), -1},  // [B, S, n]
};
inline constexpr SizeField kEmbedFp8DynamicSizes[] = {
    {offsetof(NgramInjectionParams, batch), 0},  // batch = B
    {offsetof(NgramInjectionParams, steps), 2},  // steps = S
    {offsetof(NgramInjectionParams, branches), 18},  // branches = n
    {offsetof(NgramInjectionParams, hidden), 4},  // hidden = H
    {offsetof(NgramInjectionParams, width), 12},  // width = width
    {offsetof(NgramInjectionParams, rows), 14},  // rows = P
    {offsetof(NgramInjectionParams, ring), 16},  // ring = Q
};
inline constexpr FormatField kEmbedFp8DynamicFormats[] = {
    {offsetof(NgramInjectionParams, T), {0, 0}},
    {offsetof(NgramInjectionParams, R), {-1, 3}},
};
inline constexpr BoundRow kEmbedFp8DynamicBounds[] = {
    {7, 20, 22, -1, 0},  // slots
    {8, 20, 26, -1, 0},  // past_len
    {9, 20, 2, -1, 0},  // new_len
};
inline constexpr PortRow kPendingFp8StaticInputs[] = {
    {"r", {-1, 3}, 4, {0, 2, 18, 4}, offsetof(NgramInjectionParams, r), -1},  // [B, S, n, H]
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, y), -1},  // [B, S, H]
    {"s", {-1, 0}, 3, {0, 2, 18}, offsetof(NgramInjectionParams, s), -1},  // [B, S, n]
    {"key", {0, 0}, 3, {0, 2, 6}, offsetof(NgramInjectionParams, key), -1},  // [B, S, n*H]
    {"value", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, value), -1},  // [B, S, H]
    {"norm_key_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_key_weight), -1},  // [n*H]
    {"norm_query_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_query_weight), -1},  // [n*H]
    {"norm_conv_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_conv_weight), -1},  // [n*H]
    {"conv_weight", {0, 0}, 3, {6, 10, 12}, offsetof(NgramInjectionParams, conv_weight), -1},  // [n*H, 1, width]
    {"slots", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, new_len), -1},  // [B]
    {"conv_state", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), -1},  // [P, Q, n*H]
    {"r_scale", {-1, 0}, 1, {18}, offsetof(NgramInjectionParams, r_scale), -1},  // [n]
    {"r_out_scale", {-1, 0}, 1, {18}, offsetof(NgramInjectionParams, r_out_scale), -1},  // [n]
};
inline constexpr PortRow kPendingFp8StaticOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 18, 4}, offsetof(NgramInjectionParams, r_out), -1},  // [B, S, n, H]
    {"conv_state_out", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), 12},  // [P, Q, n*H]
};
inline constexpr SizeField kPendingFp8StaticSizes[] = {
    {offsetof(NgramInjectionParams, batch), 0},  // batch = B
    {offsetof(NgramInjectionParams, steps), 2},  // steps = S
    {offsetof(NgramInjectionParams, branches), 18},  // branches = n
    {offsetof(NgramInjectionParams, hidden), 4},  // hidden = H
    {offsetof(NgramInjectionParams, width), 12},  // width = width
    {offsetof(NgramInjectionParams, rows), 14},  // rows = P
    {offsetof(NgramInjectionParams, ring), 16},  // ring = Q
};
inline constexpr FormatField kPendingFp8StaticFormats[] = {
    {offsetof(NgramInjectionParams, T), {0, 0}},
    {offsetof(NgramInjectionParams, R), {-1, 3}},
};
inline constexpr BoundRow kPendingFp8StaticBounds[] = {
    {9, 20, 22, -1, 0},  // slots
    {10, 20, 26, -1, 0},  // past_len
    {11, 20, 2, -1, 0},  // new_len
};
inline constexpr PortRow kPendingFp8DynamicInputs[] = {
    {"r", {-1, 3}, 4, {0, 2, 18, 4}, offsetof(NgramInjectionParams, r), -1},  // [B, S, n, H]
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, y), -1},  // [B, S, H]
    {"s", {-1, 0}, 3, {0, 2, 18}, offsetof(NgramInjectionParams, s), -1},  // [B, S, n]
    {"key", {0, 0}, 3, {0, 2, 6}, offsetof(NgramInjectionParams, key), -1},  // [B, S, n*H]
    {"value", {0, 0}, 3, {0, 2, 4}, offsetof(NgramInjectionParams, value), -1},  // [B, S, H]
    {"norm_key_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_key_weight), -1},  // [n*H]
    {"norm_query_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_query_weight), -1},  // [n*H]
    {"norm_conv_weight", {0, 0}, 1, {6}, offsetof(NgramInjectionParams, norm_conv_weight), -1},  // [n*H]
    {"conv_weight", {0, 0}, 3, {6, 10, 12}, offsetof(NgramInjectionParams, conv_weight), -1},  // [n*H, 1, width]
    {"slots", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(NgramInjectionParams, new_len), -1},  // [B]
    {"conv_state", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), -1},  // [P, Q, n*H]
    {"r_token_scale", {-1, 0}, 3, {0, 2, 18}, offsetof(NgramInjectionParams, r_token_scale), -1},  // [B, S, n]
};
inline constexpr PortRow kPendingFp8DynamicOutputs[] = {
    {"r_out", {-1, 3}, 4, {0, 2, 18, 4}, offsetof(NgramInjectionParams, r_out), -1},  // [B, S, n, H]
    {"conv_state_out", {0, 0}, 3, {14, 16, 6}, offsetof(NgramInjectionParams, conv_state), 12},  // [P, Q, n*H]
    {"r_out_token_scale", {-1, 0}, 3, {0, 2, 18}, offsetof(NgramInjectionParams, r_out_token_scale), -1},  // [B, S, n]
};
inline constexpr SizeField kPendingFp8DynamicSizes[] = {
    {offsetof(NgramInjectionParams, batch), 0},  // batch = B
    {offsetof(NgramInjectionParams, steps), 2},  // steps = S
    {offsetof(NgramInjectionParams, branches), 18},  // branches = n
    {offsetof(NgramInjectionParams, hidden), 4},  // hidden = H
    {offsetof(NgramInjectionParams, width), 12},  // width = width
    {offsetof(NgramInjectionParams, rows), 14},  // rows = P
    {offsetof(NgramInjectionParams, ring), 16},  // ring = Q
};
inline constexpr FormatField kPendingFp8DynamicFormats[] = {
    {offsetof(NgramInjectionParams, T), {0, 0}},
    {offsetof(NgramInjectionParams, R), {-1, 3}},
};
inline constexpr BoundRow kPendingFp8DynamicBounds[] = {
    {9, 20, 22, -1, 0},  // slots
    {10, 20, 26, -1, 0},  // past_len
    {11, 20, 2, -1, 0},  // new_len
};
inline constexpr FormRow kForms[] = {
    {"embed", kEmbedInputs, kEmbedOutputs, kEmbedSizes, kEmbedFormats, kEmbedBounds},
    {"pending", kPendingInputs, kPendingOutputs, kPendingSizes, kPendingFormats, kPendingBounds},
    {"embed_fp8_static", kEmbedFp8StaticInputs, kEmbedFp8StaticOutputs, kEmbedFp8StaticSizes, kEmbedFp8StaticFormats, kEmbedFp8StaticBounds},
    {"embed_fp8_dynamic", kEmbedFp8DynamicInputs, kEmbedFp8DynamicOutputs, kEmbedFp8DynamicSizes, kEmbedFp8DynamicFormats, kEmbedFp8DynamicBounds},
    {"pending_fp8_static", kPendingFp8StaticInputs, kPendingFp8StaticOutputs, kPendingFp8StaticSizes, kPendingFp8StaticFormats, kPendingFp8StaticBounds},
    {"pending_fp8_dynamic", kPendingFp8DynamicInputs, kPendingFp8DynamicOutputs, kPendingFp8DynamicSizes, kPendingFp8DynamicFormats, kPendingFp8DynamicBounds},
};
inline constexpr OpRow kOp = {"NgramInjection", "ngram_injection", kSizes, kCode, kAttributes,
                               kCombinations, kForms, sizeof(NgramInjectionParams),
                               offsetof(NgramInjectionParams, workspace), offsetof(NgramInjectionParams, stream),
                               -1, -1};

}  // namespace ngram_injection_op

namespace gated_delta_net_op {

inline constexpr const char* kSizes[] = {"B", "S", "Dk", "V", "Dv", "K", "width", "P", "Q", "W"};
inline constexpr Code kCode[] = {
    {Step::size, 0}, {Step::end, 0},  // B
    {Step::size, 1}, {Step::end, 0},  // S
    {Step::constant, 2}, {Step::size, 5}, {Step::multiply, 0}, {Step::size, 2}, {Step::multiply, 0}, {Step::size, 3}, {Step::size, 4}, {Step::multiply, 0}, {Step::add, 0}, {Step::end, 0},  // 2*K*Dk+V*Dv
    {Step::size, 3}, {Step::size, 4}, {Step::multiply, 0}, {Step::end, 0},  // V*Dv
    {Step::size, 3}, {Step::end, 0},  // V
    {Step::constant, 1}, {Step::end, 0},  // 1
    {Step::size, 6}, {Step::end, 0},  // width
    {Step::size, 4}, {Step::end, 0},  // Dv
    {Step::size, 7}, {Step::end, 0},  // P
    {Step::size, 8}, {Step::end, 0},  // Q
    {Step::size, 2}, {Step::end, 0},  // Dk
    {Step::size, 9}, {Step::end, 0},  // W
    {Step::size, 5}, {Step::size, 2}, {Step::multiply, 0}, {Step::size, 3}, {Step::size, 4}, {Step::multiply, 0}, {Step::add, 0}, {Step::constant, 2}, {Step::size, 3}, {Step::multiply, 0}, {Step::add, 0}, {Step::end, 0},  // K*Dk+V*Dv+2*V
    {Step::constant, 0}, {Step::end, 0},  // 0
    {Step::size, 7}, {Step::constant, -1}, {Step::add, 0}, {Step::end, 0},  // P+-1
    {Step::constant, 16777216}, {Step::end, 0},  // 16777216
    {Step::size, 5}, {Step::end, 0},  // K
    {Step::size, 0}, {Step::size, 5}, {Step::multiply, 0}, {Step::end, 0},  // (B)*(K)
};
inline constexpr AttributeRow kAttributes[] = {
    {"eps", Kind::number, -1, offsetof(GatedDeltaNetParams, eps), {}},
    {"key_heads", Kind::integer, 5, -1, {}},
    {"gate", Kind::text, -1, offsetof(GatedDeltaNetParams, silu_gate), {"sigmoid", "silu"}},
};
inline constexpr Combination kCombinations[] = {{0, 0}, {0, 1}, {1, 0}, {1, 1}};
inline constexpr PortRow kDefaultInputs[] = {
    {"qkv", {0, 0}, 3, {0, 2, 4}, offsetof(GatedDeltaNetParams, qkv), -1},  // [B, S, 2*K*Dk+V*Dv]
    {"z", {0, 0}, 3, {0, 2, 14}, offsetof(GatedDeltaNetParams, z), -1},  // [B, S, V*Dv]
    {"a", {0, 0}, 3, {0, 2, 18}, offsetof(GatedDeltaNetParams, a), -1},  // [B, S, V]
    {"b", {0, 0}, 3, {0, 2, 18}, offsetof(GatedDeltaNetParams, b), -1},  // [B, S, V]
    {"conv_weight", {0, 0}, 3, {4, 20, 22}, offsetof(GatedDeltaNetParams, conv_weight), -1},  // [2*K*Dk+V*Dv, 1, width]
    {"A_log", {-1, 0}, 1, {18}, offsetof(GatedDeltaNetParams, A_log), -1},  // [V]
    {"dt_bias", {-1, 0}, 1, {18}, offsetof(GatedDeltaNetParams, dt_bias), -1},  // [V]
    {"norm_weight", {-1, 0}, 1, {24}, offsetof(GatedDeltaNetParams, norm_weight), -1},  // [Dv]
    {"slots", {-1, 4}, 1, {0}, offsetof(GatedDeltaNetParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(GatedDeltaNetParams, past_len), -1},  // [B]
    {"accepted", {-1, 4}, 1, {0}, offsetof(GatedDeltaNetParams, accepted), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(GatedDeltaNetParams, new_len), -1},  // [B]
    {"conv_state", {0, 0}, 3, {26, 28, 4}, offsetof(GatedDeltaNetParams, conv_state), -1},  // [P, Q, 2*K*Dk+V*Dv]
    {"recurrent_state", {1, 0}, 4, {26, 18, 30, 24}, offsetof(GatedDeltaNetParams, recurrent_state), -1},  // [P, V, Dk, Dv]
    {"pending_state", {-1, 0}, 3, {26, 32, 34}, offsetof(GatedDeltaNetParams, pending_state), -1},  // [P, W, K*Dk+V*Dv+2*V]
};
inline constexpr PortRow kDefaultOutputs[] = {
    {"y", {0, 0}, 3, {0, 2, 14}, offsetof(GatedDeltaNetParams, y), -1},  // [B, S, V*Dv]
    {"conv_state_out", {0, 0}, 3, {26, 28, 4}, offsetof(GatedDeltaNetParams, conv_state), 12},  // [P, Q, 2*K*Dk+V*Dv]
    {"recurrent_state_out", {1, 0}, 4, {26, 18, 30, 24}, offsetof(GatedDeltaNetParams, recurrent_state), 13},  // [P, V, Dk, Dv]
    {"pending_state_out", {-1, 0}, 3, {26, 32, 34}, offsetof(GatedDeltaNetParams, pending_state), 14},  // [P, W, K*Dk+V*Dv+2*V]
};
inline constexpr SizeField kDefaultSizes[] = {
    {offsetof(GatedDeltaNetParams, batch), 0},  // batch = B
    {offsetof(GatedDeltaNetParams, steps), 2},  // steps = S
    {offsetof(GatedDeltaNetParams, channels), 4},  // channels = 2*K*Dk+V*Dv
    {offsetof(GatedDeltaNetParams, key_heads), 54},  // key_heads = K
    {offsetof(GatedDeltaNetParams, value_heads), 18},  // value_heads = V
    {offsetof(GatedDeltaNetParams, key_dim), 30},  // key_dim = Dk
    {offsetof(GatedDeltaNetParams, value_dim), 24},  // value_dim = Dv
    {offsetof(GatedDeltaNetParams, width), 22},  // width = width
    {offsetof(GatedDeltaNetParams, rows), 26},  // rows = P
    {offsetof(GatedDeltaNetParams, ring), 28},  // ring = Q
    {offsetof(GatedDeltaNetParams, window), 32},  // window = W
    {offsetof(GatedDeltaNetParams, pending_columns), 34},  // pending_columns = K*Dk+V*Dv+2*V
};
inline constexpr FormatField kDefaultFormats[] = {
    {offsetof(GatedDeltaNetParams, T), {0, 0}},
    {offsetof(GatedDeltaNetParams, U), {1, 0}},
};
inline constexpr BoundRow kDefaultBounds[] = {
    {8, 46, 48, -1, 0},  // slots
    {9, 46, 52, -1, 0},  // past_len
    {10, 46, 32, -1, 0},  // accepted
    {11, 46, 2, -1, 0},  // new_len
};
inline constexpr FormRow kForms[] = {
    {"default", kDefaultInputs, kDefaultOutputs, kDefaultSizes, kDefaultFormats, kDefaultBounds},
};
inline constexpr OpRow kOp = {"GatedDeltaNet", "gated_delta_net", kSizes, kCode, kAttributes,
                               kCombinations, kForms, sizeof(GatedDeltaNetParams),
                               offsetof(GatedDeltaNetParams, workspace), offsetof(GatedDeltaNetParams, stream),
                               offsetof(GatedDeltaNetParams, tickets), 56};

}  // namespace gated_delta_net_op

namespace sparse_attention_op {

inline constexpr const char* kSizes[] = {"B", "S", "D", "Nq", "Nkv", "Di", "Ni", "F", "P", "C1", "Q", "NB1", "budget_blocks", "block"};
inline constexpr Code kCode[] = {
    {Step::size, 0}, {Step::end, 0},  // B
    {Step::size, 1}, {Step::end, 0},  // S
    {Step::size, 3}, {Step::constant, 2}, {Step::multiply, 0}, {Step::size, 2}, {Step::multiply, 0}, {Step::end, 0},  // Nq*2*D
    {Step::size, 4}, {Step::size, 2}, {Step::multiply, 0}, {Step::end, 0},  // Nkv*D
    {Step::size, 6}, {Step::size, 5}, {Step::multiply, 0}, {Step::size, 5}, {Step::add, 0}, {Step::end, 0},  // Ni*Di+Di
    {Step::size, 2}, {Step::end, 0},  // D
    {Step::size, 5}, {Step::end, 0},  // Di
    {Step::size, 7}, {Step::end, 0},  // F
    {Step::size, 8}, {Step::end, 0},  // P
    {Step::size, 9}, {Step::end, 0},  // C1
    {Step::size, 4}, {Step::end, 0},  // Nkv
    {Step::size, 10}, {Step::end, 0},  // Q
    {Step::size, 11}, {Step::end, 0},  // NB1
    {Step::size, 3}, {Step::size, 2}, {Step::multiply, 0}, {Step::end, 0},  // Nq*D
    {Step::constant, 0}, {Step::end, 0},  // 0
    {Step::size, 8}, {Step::constant, -1}, {Step::add, 0}, {Step::end, 0},  // P+-1
    {Step::size, 9}, {Step::constant, -1}, {Step::add, 0}, {Step::end, 0},  // C1+-1
    {Step::size, 3}, {Step::end, 0},  // Nq
    {Step::size, 6}, {Step::end, 0},  // Ni
    {Step::size, 12}, {Step::end, 0},  // budget_blocks
    {Step::constant, -1}, {Step::end, 0},  // -1
    {Step::size, 9}, {Step::size, 13}, {Step::divide, 0}, {Step::constant, -1}, {Step::add, 0}, {Step::end, 0},  // C1//block+-1
    {Step::constant, 1}, {Step::end, 0},  // 1
};
inline constexpr AttributeRow kAttributes[] = {
    {"eps", Kind::number, -1, offsetof(SparseAttentionParams, eps), {}},
    {"heads", Kind::integer, 3, -1, {}},
    {"kv_heads", Kind::integer, 4, -1, {}},
    {"head_dim", Kind::integer, 2, -1, {}},
    {"index_heads", Kind::integer, 6, -1, {}},
    {"index_head_dim", Kind::integer, 5, -1, {}},
    {"block", Kind::integer, 13, offsetof(SparseAttentionParams, block), {}},
    {"budget_blocks", Kind::integer, 12, -1, {}},
    {"rope_scale", Kind::number, -1, offsetof(SparseAttentionParams, rope_scale), {}},
};
inline constexpr Combination kCombinations[] = {{0, 0}, {1, 1}};
inline constexpr PortRow kSelectInputs[] = {
    {"q_gate", {0, 0}, 3, {0, 2, 4}, offsetof(SparseAttentionParams, q_gate), -1},  // [B, S, Nq*2*D]
    {"k", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, k), -1},  // [B, S, Nkv*D]
    {"v", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, v), -1},  // [B, S, Nkv*D]
    {"index_qk", {0, 0}, 3, {0, 2, 14}, offsetof(SparseAttentionParams, index_qk), -1},  // [B, S, Ni*Di+Di]
    {"q_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, q_norm_weight), -1},  // [D]
    {"k_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, k_norm_weight), -1},  // [D]
    {"index_q_norm_weight", {0, 0}, 1, {22}, offsetof(SparseAttentionParams, index_q_norm_weight), -1},  // [Di]
    {"index_k_norm_weight", {0, 0}, 1, {22}, offsetof(SparseAttentionParams, index_k_norm_weight), -1},  // [Di]
    {"inv_freq", {-1, 0}, 1, {24}, offsetof(SparseAttentionParams, inv_freq), -1},  // [F]
    {"slots", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, new_len), -1},  // [B]
    {"key_state", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), -1},  // [P, C1, Nkv, D]
    {"value_state", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), -1},  // [P, C1, Nkv, D]
    {"index_tail_state", {0, 0}, 3, {26, 32, 22}, offsetof(SparseAttentionParams, index_tail_state), -1},  // [P, Q, Di]
    {"index_key_state", {0, 0}, 3, {26, 34, 22}, offsetof(SparseAttentionParams, index_key_state), -1},  // [P, NB1, Di]
};
inline constexpr PortRow kSelectOutputs[] = {
    {"y", {0, 0}, 3, {0, 2, 36}, offsetof(SparseAttentionParams, y), -1},  // [B, S, Nq*D]
    {"key_state_out", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), 12},  // [P, C1, Nkv, D]
    {"value_state_out", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), 13},  // [P, C1, Nkv, D]
    {"index_tail_state_out", {0, 0}, 3, {26, 32, 22}, offsetof(SparseAttentionParams, index_tail_state), 14},  // [P, Q, Di]
    {"index_key_state_out", {0, 0}, 3, {26, 34, 22}, offsetof(SparseAttentionParams, index_key_state), 15},  // [P, NB1, Di]
};
inline constexpr SizeField kSelectSizes[] = {
    {offsetof(SparseAttentionParams, batch), 0},  // batch = B
    {offsetof(SparseAttentionParams, steps), 2},  // steps = S
    {offsetof(SparseAttentionParams, heads), 50},  // heads = Nq
    {offsetof(SparseAttentionParams, kv_heads), 30},  // kv_heads = Nkv
    {offsetof(SparseAttentionParams, head_dim), 20},  // head_dim = D
    {offsetof(SparseAttentionParams, index_heads), 52},  // index_heads = Ni
    {offsetof(SparseAttentionParams, index_head_dim), 22},  // index_head_dim = Di
    {offsetof(SparseAttentionParams, frequencies), 24},  // frequencies = F
    {offsetof(SparseAttentionParams, rows), 26},  // rows = P
    {offsetof(SparseAttentionParams, tokens), 28},  // tokens = C1
    {offsetof(SparseAttentionParams, ring), 32},  // ring = Q
    {offsetof(SparseAttentionParams, index_blocks), 34},  // index_blocks = NB1
    {offsetof(SparseAttentionParams, budget_blocks), 54},  // budget_blocks = budget_blocks
};
inline constexpr FormatField kSelectFormats[] = {
    {offsetof(SparseAttentionParams, T), {0, 0}},
    {offsetof(SparseAttentionParams, K), {0, 0}},
};
inline constexpr BoundRow kSelectBounds[] = {
    {9, 40, 42, -1, 0},  // slots
    {10, 40, 46, -1, 0},  // past_len
    {11, 40, 2, 10, 46},  // new_len
};
inline constexpr PortRow kSelectReturnInputs[] = {
    {"q_gate", {0, 0}, 3, {0, 2, 4}, offsetof(SparseAttentionParams, q_gate), -1},  // [B, S, Nq*2*D]
    {"k", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, k), -1},  // [B, S, Nkv*D]
    {"v", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, v), -1},  // [B, S, Nkv*D]
    {"index_qk", {0, 0}, 3, {0, 2, 14}, offsetof(SparseAttentionParams, index_qk), -1},  // [B, S, Ni*Di+Di]
    {"q_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, q_norm_weight), -1},  // [D]
    {"k_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, k_norm_weight), -1},  // [D]
    {"index_q_norm_weight", {0, 0}, 1, {22}, offsetof(SparseAttentionParams, index_q_norm_weight), -1},  // [Di]
    {"index_k_norm_weight", {0, 0}, 1, {22}, offsetof(SparseAttentionParams, index_k_norm_weight), -1},  // [Di]
    {"inv_freq", {-1, 0}, 1, {24}, offsetof(SparseAttentionParams, inv_freq), -1},  // [F]
    {"slots", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, new_len), -1},  // [B]
    {"key_state", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), -1},  // [P, C1, Nkv, D]
    {"value_state", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), -1},  // [P, C1, Nkv, D]
    {"index_tail_state", {0, 0}, 3, {26, 32, 22}, offsetof(SparseAttentionParams, index_tail_state), -1},  // [P, Q, Di]
    {"index_key_state", {0, 0}, 3, {26, 34, 22}, offsetof(SparseAttentionParams, index_key_state), -1},  // [P, NB1, Di]
};
inline constexpr PortRow kSelectReturnOutputs[] = {
    {"y", {0, 0}, 3, {0, 2, 36}, offsetof(SparseAttentionParams, y), -1},  // [B, S, Nq*D]
    {"key_state_out", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), 12},  // [P, C1, Nkv, D]
    {"value_state_out", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), 13},  // [P, C1, Nkv, D]
    {"index_tail_state_out", {0, 0}, 3, {26, 32, 22}, offsetof(SparseAttentionParams, index_tail_state), 14},  // [P, Q, Di]
    {"index_key_state_out", {0, 0}, 3, {26, 34, 22}, offsetof(SparseAttentionParams, index_key_state), 15},  // [P, NB1, Di]
    {"blocks_out", {-1, 4}, 2, {0, 54}, offsetof(SparseAttentionParams, blocks_out), -1},  // [B, budget_blocks]
};
inline constexpr SizeField kSelectReturnSizes[] = {
    {offsetof(SparseAttentionParams, batch), 0},  // batch = B
    {offsetof(SparseAttentionParams, steps), 2},  // steps = S
    {offsetof(SparseAttentionParams, heads), 50},  // heads = Nq
    {offsetof(SparseAttentionParams, kv_heads), 30},  // kv_heads = Nkv
    {offsetof(SparseAttentionParams, head_dim), 20},  // head_dim = D
    {offsetof(SparseAttentionParams, index_heads), 52},  // index_heads = Ni
    {offsetof(SparseAttentionParams, index_head_dim), 22},  // index_head_dim = Di
    {offsetof(SparseAttentionParams, frequencies), 24},  // frequencies = F
    {offsetof(SparseAttentionParams, rows), 26},  // rows = P
    {offsetof(SparseAttentionParams, tokens), 28},  // tokens = C1
    {offsetof(SparseAttentionParams, ring), 32},  // ring = Q
    {offsetof(SparseAttentionParams, index_blocks), 34},  // index_blocks = NB1
    {offsetof(SparseAttentionParams, budget_blocks), 54},  // budget_blocks = budget_blocks
};
inline constexpr FormatField kSelectReturnFormats[] = {
    {offsetof(SparseAttentionParams, T), {0, 0}},
    {offsetof(SparseAttentionParams, K), {0, 0}},
};
inline constexpr BoundRow kSelectReturnBounds[] = {
    {9, 40, 42, -1, 0},  // slots
    {10, 40, 46, -1, 0},  // past_len
    {11, 40, 2, 10, 46},  // new_len
};
inline constexpr PortRow kGivenInputs[] = {
    {"q_gate", {0, 0}, 3, {0, 2, 4}, offsetof(SparseAttentionParams, q_gate), -1},  // [B, S, Nq*2*D]
    {"k", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, k), -1},  // [B, S, Nkv*D]
    {"v", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, v), -1},  // [B, S, Nkv*D]
    {"q_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, q_norm_weight), -1},  // [D]
    {"k_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, k_norm_weight), -1},  // [D]
    {"inv_freq", {-1, 0}, 1, {24}, offsetof(SparseAttentionParams, inv_freq), -1},  // [F]
    {"slots", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, new_len), -1},  // [B]
    {"key_state", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), -1},  // [P, C1, Nkv, D]
    {"value_state", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), -1},  // [P, C1, Nkv, D]
    {"blocks", {-1, 4}, 2, {0, 54}, offsetof(SparseAttentionParams, blocks), -1},  // [B, budget_blocks]
    {"blocks_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, blocks_len), -1},  // [B]
};
inline constexpr PortRow kGivenOutputs[] = {
    {"y", {0, 0}, 3, {0, 2, 36}, offsetof(SparseAttentionParams, y), -1},  // [B, S, Nq*D]
    {"key_state_out", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), 9},  // [P, C1, Nkv, D]
    {"value_state_out", {0, 0}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), 10},  // [P, C1, Nkv, D]
};
inline constexpr SizeField kGivenSizes[] = {
    {offsetof(SparseAttentionParams, batch), 0},  // batch = B
    {offsetof(SparseAttentionParams, steps), 2},  // steps = S
    {offsetof(SparseAttentionParams, heads), 50},  // heads = Nq
    {offsetof(SparseAttentionParams, kv_heads), 30},  // kv_heads = Nkv
    {offsetof(SparseAttentionParams, head_dim), 20},  // head_dim = D
    {offsetof(SparseAttentionParams, index_heads), 52},  // index_heads = Ni
    {offsetof(SparseAttentionParams, index_head_dim), 22},  // index_head_dim = Di
    {offsetof(SparseAttentionParams, frequencies), 24},  // frequencies = F
    {offsetof(SparseAttentionParams, rows), 26},  // rows = P
    {offsetof(SparseAttentionParams, tokens), 28},  // tokens = C1
    {offsetof(SparseAttentionParams, budget_blocks), 54},  // budget_blocks = budget_blocks
};
inline constexpr FormatField kGivenFormats[] = {
    {offsetof(SparseAttentionParams, T), {0, 0}},
    {offsetof(SparseAttentionParams, K), {0, 0}},
};
inline constexpr BoundRow kGivenBounds[] = {
    {6, 40, 42, -1, 0},  // slots
    {7, 40, 46, -1, 0},  // past_len
    {8, 40, 2, 7, 46},  // new_len
    {11, 56, 58, -1, 0},  // blocks
    {12, 40, 46, -1, 0},  // blocks_len
};
inline constexpr PortRow kSelectFp8CacheInputs[] = {
    {"q_gate", {0, 0}, 3, {0, 2, 4}, offsetof(SparseAttentionParams, q_gate), -1},  // [B, S, Nq*2*D]
    {"k", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, k), -1},  // [B, S, Nkv*D]
    {"v", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, v), -1},  // [B, S, Nkv*D]
    {"index_qk", {0, 0}, 3, {0, 2, 14}, offsetof(SparseAttentionParams, index_qk), -1},  // [B, S, Ni*Di+Di]
    {"q_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, q_norm_weight), -1},  // [D]
    {"k_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, k_norm_weight), -1},  // [D]
    {"index_q_norm_weight", {0, 0}, 1, {22}, offsetof(SparseAttentionParams, index_q_norm_weight), -1},  // [Di]
    {"index_k_norm_weight", {0, 0}, 1, {22}, offsetof(SparseAttentionParams, index_k_norm_weight), -1},  // [Di]
    {"inv_freq", {-1, 0}, 1, {24}, offsetof(SparseAttentionParams, inv_freq), -1},  // [F]
    {"slots", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, new_len), -1},  // [B]
    {"key_state", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), -1},  // [P, C1, Nkv, D]
    {"value_state", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), -1},  // [P, C1, Nkv, D]
    {"index_tail_state", {0, 0}, 3, {26, 32, 22}, offsetof(SparseAttentionParams, index_tail_state), -1},  // [P, Q, Di]
    {"index_key_state", {0, 0}, 3, {26, 34, 22}, offsetof(SparseAttentionParams, index_key_state), -1},  // [P, NB1, Di]
    {"k_scale", {-1, 0}, 1, {64}, offsetof(SparseAttentionParams, k_scale), -1},  // [1]
    {"v_scale", {-1, 0}, 1, {64}, offsetof(SparseAttentionParams, v_scale), -1},  // [1]
};
inline constexpr PortRow kSelectFp8CacheOutputs[] = {
    {"y", {0, 0}, 3, {0, 2, 36}, offsetof(SparseAttentionParams, y), -1},  // [B, S, Nq*D]
    {"key_state_out", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), 12},  // [P, C1, Nkv, D]
    {"value_state_out", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), 13},  // [P, C1, Nkv, D]
    {"index_tail_state_out", {0, 0}, 3, {26, 32, 22}, offsetof(SparseAttentionParams, index_tail_state), 14},  // [P, Q, Di]
    {"index_key_state_out", {0, 0}, 3, {26, 34, 22}, offsetof(SparseAttentionParams, index_key_state), 15},  // [P, NB1, Di]
};
inline constexpr SizeField kSelectFp8CacheSizes[] = {
    {offsetof(SparseAttentionParams, batch), 0},  // batch = B
    {offsetof(SparseAttentionParams, steps), 2},  // steps = S
    {offsetof(SparseAttentionParams, heads), 50},  // heads = Nq
    {offsetof(SparseAttentionParams, kv_heads), 30},  // kv_heads = Nkv
    {offsetof(SparseAttentionParams, head_dim), 20},  // head_dim = D
    {offsetof(SparseAttentionParams, index_heads), 52},  // index_heads = Ni
    {offsetof(SparseAttentionParams, index_head_dim), 22},  // index_head_dim = Di
    {offsetof(SparseAttentionParams, frequencies), 24},  // frequencies = F
    {offsetof(SparseAttentionParams, rows), 26},  // rows = P
    {offsetof(SparseAttentionParams, tokens), 28},  // tokens = C1
    {offsetof(SparseAttentionParams, ring), 32},  // ring = Q
    {offsetof(SparseAttentionParams, index_blocks), 34},  // index_blocks = NB1
    {offsetof(SparseAttentionParams, budget_blocks), 54},  // budget_blocks = budget_blocks
};
inline constexpr FormatField kSelectFp8CacheFormats[] = {
    {offsetof(SparseAttentionParams, T), {0, 0}},
    {offsetof(SparseAttentionParams, K), {-1, 3}},
};
inline constexpr BoundRow kSelectFp8CacheBounds[] = {
    {9, 40, 42, -1, 0},  // slots
    {10, 40, 46, -1, 0},  // past_len
    {11, 40, 2, 10, 46},  // new_len
};
inline constexpr PortRow kSelectReturnFp8CacheInputs[] = {
    {"q_gate", {0, 0}, 3, {0, 2, 4}, offsetof(SparseAttentionParams, q_gate), -1},  // [B, S, Nq*2*D]
    {"k", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, k), -1},  // [B, S, Nkv*D]
    {"v", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, v), -1},  // [B, S, Nkv*D]
    {"index_qk", {0, 0}, 3, {0, 2, 14}, offsetof(SparseAttentionParams, index_qk), -1},  // [B, S, Ni*Di+Di]
    {"q_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, q_norm_weight), -1},  // [D]
    {"k_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, k_norm_weight), -1},  // [D]
    {"index_q_norm_weight", {0, 0}, 1, {22}, offsetof(SparseAttentionParams, index_q_norm_weight), -1},  // [Di]
    {"index_k_norm_weight", {0, 0}, 1, {22}, offsetof(SparseAttentionParams, index_k_norm_weight), -1},  // [Di]
    {"inv_freq", {-1, 0}, 1, {24}, offsetof(SparseAttentionParams, inv_freq), -1},  // [F]
    {"slots", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, new_len), -1},  // [B]
    {"key_state", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), -1},  // [P, C1, Nkv, D]
    {"value_state", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), -1},  // [P, C1, Nkv, D]
    {"index_tail_state", {0, 0}, 3, {26, 32, 22}, offsetof(SparseAttentionParams, index_tail_state), -1},  // [P, Q, Di]
    {"index_key_state", {0, 0}, 3, {26, 34, 22}, offsetof(SparseAttentionParams, index_key_state), -1},  // [P, NB1, Di]
    {"k_scale", {-1, 0}, 1, {64}, offsetof(SparseAttentionParams, k_scale), -1},  // [1]
    {"v_scale", {-1, 0}, 1, {64}, offsetof(SparseAttentionParams, v_scale), -1},  // [1]
};
inline constexpr PortRow kSelectReturnFp8CacheOutputs[] = {
    {"y", {0, 0}, 3, {0, 2, 36}, offsetof(SparseAttentionParams, y), -1},  // [B, S, Nq*D]
    {"key_state_out", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), 12},  // [P, C1, Nkv, D]
    {"value_state_out", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), 13},  // [P, C1, Nkv, D]
    {"index_tail_state_out", {0, 0}, 3, {26, 32, 22}, offsetof(SparseAttentionParams, index_tail_state), 14},  // [P, Q, Di]
    {"index_key_state_out", {0, 0}, 3, {26, 34, 22}, offsetof(SparseAttentionParams, index_key_state), 15},  // [P, NB1, Di]
    {"blocks_out", {-1, 4}, 2, {0, 54}, offsetof(SparseAttentionParams, blocks_out), -1},  // [B, budget_blocks]
};
inline constexpr SizeField kSelectReturnFp8CacheSizes[] = {
    {offsetof(SparseAttentionParams, batch), 0},  // batch = B
    {offsetof(SparseAttentionParams, steps), 2},  // steps = S
    {offsetof(SparseAttentionParams, heads), 50},  // heads = Nq
    {offsetof(SparseAttentionParams, kv_heads), 30},  // kv_heads = Nkv
    {offsetof(SparseAttentionParams, head_dim), 20},  // head_dim = D
    {offsetof(SparseAttentionParams, index_heads), 52},  // index_heads = Ni
    {offsetof(SparseAttentionParams, index_head_dim), 22},  // index_head_dim = Di
    {offsetof(SparseAttentionParams, frequencies), 24},  // frequencies = F
    {offsetof(SparseAttentionParams, rows), 26},  // rows = P
    {offsetof(SparseAttentionParams, tokens), 28},  // tokens = C1
    {offsetof(SparseAttentionParams, ring), 32},  // ring = Q
    {offsetof(SparseAttentionParams, index_blocks), 34},  // index_blocks = NB1
    {offsetof(SparseAttentionParams, budget_blocks), 54},  // budget_blocks = budget_blocks
};
inline constexpr FormatField kSelectReturnFp8CacheFormats[] = {
    {offsetof(SparseAttentionParams, T), {0, 0}},
    {offsetof(SparseAttentionParams, K), {-1, 3}},
};
inline constexpr BoundRow kSelectReturnFp8CacheBounds[] = {
    {9, 40, 42, -1, 0},  // slots
    {10, 40, 46, -1, 0},  // past_len
    {11, 40, 2, 10, 46},  // new_len
};
inline constexpr PortRow kGivenFp8CacheInputs[] = {
    {"q_gate", {0, 0}, 3, {0, 2, 4}, offsetof(SparseAttentionParams, q_gate), -1},  // [B, S, Nq*2*D]
    {"k", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, k), -1},  // [B, S, Nkv*D]
    {"v", {0, 0}, 3, {0, 2, 10}, offsetof(SparseAttentionParams, v), -1},  // [B, S, Nkv*D]
    {"q_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, q_norm_weight), -1},  // [D]
    {"k_norm_weight", {0, 0}, 1, {20}, offsetof(SparseAttentionParams, k_norm_weight), -1},  // [D]
    {"inv_freq", {-1, 0}, 1, {24}, offsetof(SparseAttentionParams, inv_freq), -1},  // [F]
    {"slots", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, slots), -1},  // [B]
    {"past_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, past_len), -1},  // [B]
    {"new_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, new_len), -1},  // [B]
    {"key_state", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), -1},  // [P, C1, Nkv, D]
    {"value_state", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), -1},  // [P, C1, Nkv, D]
    {"blocks", {-1, 4}, 2, {0, 54}, offsetof(SparseAttentionParams, blocks), -1},  // [B, budget_blocks]
    {"blocks_len", {-1, 4}, 1, {0}, offsetof(SparseAttentionParams, blocks_len), -1},  // [B]
    {"k_scale", {-1, 0}, 1, {64}, offsetof(SparseAttentionParams, k_scale), -1},  // [1]
    {"v_scale", {-1, 0}, 1, {64}, offsetof(SparseAttentionParams, v_scale), -1},  // [1]
};
inline constexpr PortRow kGivenFp8CacheOutputs[] = {
    {"y", {0, 0}, 3, {0, 2, 36}, offsetof(SparseAttentionParams, y), -1},  // [B, S, Nq*D]
    {"key_state_out", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, key_state), 9},  // [P, C1, Nkv, D]
    {"value_state_out", {-1, 3}, 4, {26, 28, 30, 20}, offsetof(SparseAttentionParams, value_state), 10},  // [P, C1, Nkv, D]
};
inline constexpr SizeField kGivenFp8CacheSizes[] = {
    {offsetof(SparseAttentionParams, batch), 0},  // batch = B
    {offsetof(SparseAttentionParams, steps), 2},  // steps = S
    {offsetof(SparseAttentionParams, heads), 50},  // heads = Nq
    {offsetof(SparseAttentionParams, kv_heads), 30},  // kv_heads = Nkv
    {offsetof(SparseAttentionParams, head_dim), 20},  // head_dim = D
    {offsetof(SparseAttentionParams, index_heads), 52},  // index_heads = Ni
    {offsetof(SparseAttentionParams, index_head_dim), 22},  // index_head_dim = Di
    {offsetof(SparseAttentionParams, frequencies), 24},  // frequencies = F
    {offsetof(SparseAttentionParams, rows), 26},  // rows = P
    {offsetof(SparseAttentionParams, tokens), 28},  // tokens = C1
    {offsetof(SparseAttentionParams, budget_blocks), 54},  // budget_blocks = budget_blocks
};
inline constexpr FormatField kGivenFp8CacheFormats[] = {
    {offsetof(SparseAttentionParams, T), {0, 0}},
    {offsetof(SparseAttentionParams, K), {-1, 3}},
};
inline constexpr BoundRow kGivenFp8CacheBounds[] = {
    {6, 40, 42, -1, 0},  // slots
    {7, 40, 46, -1, 0},  // past_len
    {8, 40, 2, 7, 46},  // new_len
    {11, 56, 58, -1, 0},  // blocks
    {12, 40, 46, -1, 0},  // blocks_len
};
inline constexpr FormRow kForms[] = {
    {"select", kSelectInputs, kSelectOutputs, kSelectSizes, kSelectFormats, kSelectBounds},
    {"select_return", kSelectReturnInputs, kSelectReturnOutputs, kSelectReturnSizes, kSelectReturnFormats, kSelectReturnBounds},
    {"given", kGivenInputs, kGivenOutputs, kGivenSizes, kGivenFormats, kGivenBounds},
    {"select_fp8_cache", kSelectFp8CacheInputs, kSelectFp8CacheOutputs, kSelectFp8CacheSizes, kSelectFp8CacheFormats, kSelectFp8CacheBounds},
    {"select_return_fp8_cache", kSelectReturnFp8CacheInputs, kSelectReturnFp8CacheOutputs, kSelectReturnFp8CacheSizes, kSelectReturnFp8CacheFormats, kSelectReturnFp8CacheBounds},
    {"given_fp8_cache", kGivenFp8CacheInputs, kGivenFp8CacheOutputs, kGivenFp8CacheSizes, kGivenFp8CacheFormats, kGivenFp8CacheBounds},
};
inline constexpr OpRow kOp = {"SparseAttention", "sparse_attention", kSizes, kCode, kAttributes,
                               kCombinations, kForms, sizeof(SparseAttentionParams),
                               offsetof(SparseAttentionParams, workspace), offsetof(SparseAttentionParams, stream),
                               -1, -1};

}  // namespace sparse_attention_op

namespace sparse_moe_op {

inline constexpr const char* kSizes[] = {"B", "S", "H", "experts", "I"};
inline constexpr Code kCode[] = {
    {Step::size, 0}, {Step::end, 0},  // B
    {Step::size, 1}, {Step::end, 0},  // S
    {Step::size, 2}, {Step::end, 0},  // H
    {Step::size, 3}, {Step::end, 0},  // experts
    {Step::constant, 2}, {Step::end, 0},  // 2
    {Step::size, 4}, {Step::end, 0},  // I
    {Step::size, 0}, {Step::size, 1}, {Step::multiply, 0}, {Step::end, 0},  // B*S
    {Step::size, 4}, {Step::constant, 127}, {Step::add, 0}, {Step::constant, 128}, {Step::divide, 0}, {Step::end, 0},  // (I+127)//128
    {Step::size, 2}, {Step::constant, 127}, {Step::add, 0}, {Step::constant, 128}, {Step::divide, 0}, {Step::end, 0},  // (H+127)//128
    {Step::size, 2}, {Step::constant, 2}, {Step::divide, 0}, {Step::end, 0},  // H//2
    {Step::size, 2}, {Step::constant, 16}, {Step::divide, 0}, {Step::end, 0},  // H//16
    {Step::size, 4}, {Step::constant, 2}, {Step::divide, 0}, {Step::end, 0},  // I//2
    {Step::size, 4}, {Step::constant, 16}, {Step::divide, 0}, {Step::end, 0},  // I//16
};
inline constexpr AttributeRow kAttributes[] = {
    {"top_k", Kind::integer, -1, offsetof(SparseMoEParams, top_k), {}},
    {"normalize", Kind::integer, -1, offsetof(SparseMoEParams, normalize), {}},
};
inline constexpr Combination kCombinations[] = {{0, 0}, {0, 1}, {1, 1}};
inline constexpr PortRow kPlainInputs[] = {
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(SparseMoEParams, x), -1},  // [B, S, H]
    {"router_logits", {0, 0}, 3, {0, 2, 6}, offsetof(SparseMoEParams, router_logits), -1},  // [B, S, experts]
    {"gate_up_weight", {1, 0}, 4, {6, 8, 10, 4}, offsetof(SparseMoEParams, gate_up_weight), -1},  // [experts, 2, I, H]
    {"down_weight", {1, 0}, 3, {6, 4, 10}, offsetof(SparseMoEParams, down_weight), -1},  // [experts, H, I]
};
inline constexpr PortRow kPlainOutputs[] = {
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(SparseMoEParams, y), -1},  // [B, S, H]
};
inline constexpr SizeField kPlainSizes[] = {
    {offsetof(SparseMoEParams, tokens), 12},  // tokens = B*S
    {offsetof(SparseMoEParams, hidden), 4},  // hidden = H
    {offsetof(SparseMoEParams, experts), 6},  // experts = experts
    {offsetof(SparseMoEParams, inner), 10},  // inner = I
    {offsetof(SparseMoEParams, hidden_stored), 4},  // hidden_stored = H
    {offsetof(SparseMoEParams, inner_stored), 10},  // inner_stored = I
};
inline constexpr FormatField kPlainFormats[] = {
    {offsetof(SparseMoEParams, T), {0, 0}},
    {offsetof(SparseMoEParams, W), {1, 0}},
};
inline constexpr PortRow kFp8BlockInputs[] = {
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(SparseMoEParams, x), -1},  // [B, S, H]
    {"router_logits", {0, 0}, 3, {0, 2, 6}, offsetof(SparseMoEParams, router_logits), -1},  // [B, S, experts]
    {"gate_up_weight", {-1, 3}, 4, {6, 8, 10, 4}, offsetof(SparseMoEParams, gate_up_weight), -1},  // [experts, 2, I, H]
    {"gate_up_scale", {-1, 0}, 4, {6, 8, 16, 22}, offsetof(SparseMoEParams, gate_up_scale), -1},  // [experts, 2, (I+127)//128, (H+127)//128]
    {"down_weight", {-1, 3}, 3, {6, 4, 10}, offsetof(SparseMoEParams, down_weight), -1},  // [experts, H, I]
    {"down_scale", {-1, 0}, 3, {6, 22, 16}, offsetof(SparseMoEParams, down_scale), -1},  // [experts, (H+127)//128, (I+127)//128]
};
inline constexpr PortRow kFp8BlockOutputs[] = {
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(SparseMoEParams, y), -1},  // [B, S, H]
};
inline constexpr SizeField kFp8BlockSizes[] = {
    {offsetof(SparseMoEParams, tokens), 12},  // tokens = B*S
    {offsetof(SparseMoEParams, hidden), 4},  // hidden = H
    {offsetof(SparseMoEParams, experts), 6},  // experts = experts
    {offsetof(SparseMoEParams, inner), 10},  // inner = I
    {offsetof(SparseMoEParams, hidden_stored), 4},  // hidden_stored = H
    {offsetof(SparseMoEParams, inner_stored), 10},  // inner_stored = I
};
inline constexpr FormatField kFp8BlockFormats[] = {
    {offsetof(SparseMoEParams, T), {0, 0}},
    {offsetof(SparseMoEParams, W), {-1, 3}},
};
inline constexpr PortRow kNvfp4Inputs[] = {
    {"x", {0, 0}, 3, {0, 2, 4}, offsetof(SparseMoEParams, x), -1},  // [B, S, H]
    {"router_logits", {0, 0}, 3, {0, 2, 6}, offsetof(SparseMoEParams, router_logits), -1},  // [B, S, experts]
    {"gate_up_weight", {-1, 5}, 4, {6, 8, 10, 28}, offsetof(SparseMoEParams, gate_up_weight), -1},  // [experts, 2, I, H//2]
    {"gate_up_scale", {-1, 3}, 4, {6, 8, 10, 32}, offsetof(SparseMoEParams, gate_up_group_scale), -1},  // [experts, 2, I, H//16]
    {"gate_up_scale_2", {-1, 0}, 2, {6, 8}, offsetof(SparseMoEParams, gate_up_scale_2), -1},  // [experts, 2]
    {"down_weight", {-1, 5}, 3, {6, 4, 36}, offsetof(SparseMoEParams, down_weight), -1},  // [experts, H, I//2]
    {"down_scale", {-1, 3}, 3, {6, 4, 40}, offsetof(SparseMoEParams, down_group_scale), -1},  // [experts, H, I//16]
    {"down_scale_2", {-1, 0}, 1, {6}, offsetof(SparseMoEParams, down_scale_2), -1},  // [experts]
};
inline constexpr PortRow kNvfp4Outputs[] = {
    {"y", {0, 0}, 3, {0, 2, 4}, offsetof(SparseMoEParams, y), -1},  // [B, S, H]
};
inline constexpr SizeField kNvfp4Sizes[] = {
    {offsetof(SparseMoEParams, tokens), 12},  // tokens = B*S
    {offsetof(SparseMoEParams, hidden), 4},  // hidden = H
    {offsetof(SparseMoEParams, experts), 6},  // experts = experts
    {offsetof(SparseMoEParams, inner), 10},  // inner = I
    {offsetof(SparseMoEParams, hidden_stored), 28},  // hidden_stored = H//2
    {offsetof(SparseMoEParams, inner_stored), 36},  // inner_stored = I//2
};
inline constexpr FormatField kNvfp4Formats[] = {
    {offsetof(SparseMoEParams, T), {0, 0}},
    {offsetof(SparseMoEParams, W), {-1, 5}},
};
inline constexpr FormRow kForms[] = {
    {"plain", kPlainInputs, kPlainOutputs, kPlainSizes, kPlainFormats, {}},
    {"fp8_block", kFp8BlockInputs, kFp8BlockOutputs, kFp8BlockSizes, kFp8BlockFormats, {}},
    {"nvfp4", kNvfp4Inputs, kNvfp4Outputs, kNvfp4Sizes, kNvfp4Formats, {}},
};
inline constexpr OpRow kOp = {"SparseMoE", "sparse_moe", kSizes, kCode, kAttributes,
                               kCombinations, kForms, sizeof(SparseMoEParams),
                               offsetof(SparseMoEParams, workspace), offsetof(SparseMoEParams, stream),
                               -1, -1};

}  // namespace sparse_moe_op

inline constexpr OpRow kOps[] = {gated_residual_op::kOp, ngram_injection_op::kOp, gated_delta_net_op::kOp, sparse_attention_op::kOp, sparse_moe_op::kOp};

}  // namespace flashnext::trt
