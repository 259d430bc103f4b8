// The sizes of an op: bound by its attributes and by the shapes of its inputs.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

#include "tensorrt/attributes.h"
#include "tensorrt/op_table.h"
#include "tensorrt/trt.h"

namespace flashnext::trt {

using Sizes = std::array<int64_t, kMaxSizes>;
constexpr int64_t kUnbound = -1;

int64_t evaluate(const OpRow& op, Program program, const Sizes& sizes);

// The sizes that attributes bind.
Sizes attribute_sizes(const OpRow& op, const Attributes& attributes);

// The sizes that attributes and inputs bind. Fault: a shape does not fit the port, the attributes or the other shapes.
Sizes bind_sizes(const OpRow& op, const FormRow& form, const Attributes& attributes,
                 std::span<const nvinfer1::Dims> inputs);

// Fault: the port's shape is another for these sizes.
void check_shape(const OpRow& op, const PortRow& port, const Sizes& sizes, const nvinfer1::Dims& dims);

// Shapes of the outputs as expressions of those of the inputs. Fault: as above, as far as dimensions are constants.
void output_shapes(const OpRow& op, const FormRow& form, const Attributes& attributes,
                   std::span<const nvinfer1::DimsExprs> inputs, std::span<nvinfer1::DimsExprs> outputs,
                   nvinfer1::IExprBuilder& builder);

std::string text(const nvinfer1::Dims& dims);

}  // namespace flashnext::trt
