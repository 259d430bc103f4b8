// Runs the dimensions' programs, on numbers and on TensorRT's expressions.
#include "tensorrt/sizes.h"

#include "tensorrt/log.h"

namespace flashnext::trt {
namespace {

constexpr int kDepth = 8;
constexpr int64_t kLargest = int64_t(1) << 40;  // of a dimension: products of two stay inside 64 bits

// The size that a program consists of, or -1.
int plain_size(const OpRow& op, Program program) {
  const Code* const code = &op.code[program];
  return code[0].step == Step::size && code[1].step == Step::end ? code[0].value : -1;
}

// `Algebra` has Value, constant(int64_t), size(int), add, multiply and divide.
template <class Algebra>
typename Algebra::Value run(const OpRow& op, Program program, Algebra& algebra) {
  typename Algebra::Value stack[kDepth]{};
  int depth = 0;
  for (const Code* code = &op.code[program]; code->step != Step::end; code++) {
    if (code->step == Step::constant || code->step == Step::size) {
      if (depth == kDepth) throw Fault("a dimension of the op table is too deep");
      stack[depth++] = code->step == Step::size ? algebra.size(code->value) : algebra.constant(code->value);
      continue;
    }
    depth--;
    stack[depth - 1] = algebra.combine(code->step, stack[depth - 1], stack[depth]);
  }
  return stack[0];
}

struct Numbers {
  using Value = int64_t;
  const OpRow& op;
  const Sizes& sizes;

  int64_t constant(int64_t value) const { return value; }
  int64_t size(int index) const {
    if (sizes[index] == kUnbound) throw Fault(std::string("no input says what ") + op.sizes[index] + " is");
    return sizes[index];
  }
  int64_t combine(Step step, int64_t a, int64_t b) const {
    if (step == Step::divide && b == 0) throw Fault("a dimension is divided by zero");
    const int64_t value = step == Step::add ? a + b : step == Step::multiply ? a * b : a / b;
    if (value > kLargest || value < -kLargest) throw Fault("a dimension is too large");
    return value;
  }
};

struct Expressions {
  using Value = const nvinfer1::IDimensionExpr*;
  const OpRow& op;
  std::array<Value, kMaxSizes> sizes{};
  nvinfer1::IExprBuilder& builder;

  Value constant(int64_t value) { return made(builder.constant(value)); }
  Value size(int index) {
    if (!sizes[index]) throw Fault(std::string("no input says what ") + op.sizes[index] + " is");
    return sizes[index];
  }
  Value combine(Step step, Value a, Value b) {
    using Operation = nvinfer1::DimensionOperation;
    const Operation operation = step == Step::add        ? Operation::kSUM
                                : step == Step::multiply ? Operation::kPROD
                                                         : Operation::kFLOOR_DIV;
    return made(builder.operation(operation, *a, *b));
  }
  static Value made(Value value) {
    if (!value) throw Fault("TensorRT's expression builder gave nothing");
    return value;
  }
};

std::string shape_of(const OpRow& op, const PortRow& port, const Sizes& sizes) {
  std::string out = "[";
  for (int i = 0; i < port.rank; i++) {
    Numbers numbers{op, sizes};
    out += (i ? ", " : "") + std::to_string(run(op, port.dims[i], numbers));
  }
  return out + "]";
}

void check_rank(const PortRow& port, int64_t rank) {
  if (rank == port.rank) return;
  throw Fault(std::string(port.name) + " must have " + std::to_string(port.rank) + " dimensions, found " +
              std::to_string(rank));
}

void check_count(const char* what, size_t wanted, size_t found) {
  if (wanted == found) return;
  throw Fault("this form has " + std::to_string(wanted) + " " + what + ", found " + std::to_string(found));
}

}  // namespace

int64_t evaluate(const OpRow& op, Program program, const Sizes& sizes) {
  Numbers numbers{op, sizes};
  return run(op, program, numbers);
}

Sizes attribute_sizes(const OpRow& op, const Attributes& attributes) {
  Sizes sizes;
  sizes.fill(kUnbound);
  for (size_t i = 0; i < op.attributes.size(); i++) {
    if (op.attributes[i].size >= 0) sizes[op.attributes[i].size] = attributes.value(i).integer;
  }
  return sizes;
}

Sizes bind_sizes(const OpRow& op, const FormRow& form, const Attributes& attributes,
                 std::span<const nvinfer1::Dims> inputs) {
  check_count("inputs", form.inputs.size(), inputs.size());
  Sizes sizes = attribute_sizes(op, attributes);
  for (size_t i = 0; i < inputs.size(); i++) {
    const PortRow& port = form.inputs[i];
    check_rank(port, inputs[i].nbDims);
    for (int d = 0; d < port.rank; d++) {
      const int64_t size = inputs[i].d[d];
      if (size < 0 || size > INT32_MAX) throw Fault(std::string(port.name) + " has the shape " + text(inputs[i]));
      const int index = plain_size(op, port.dims[d]);
      if (index >= 0 && sizes[index] == kUnbound) sizes[index] = size;
    }
  }
  for (size_t i = 0; i < inputs.size(); i++) check_shape(op, form.inputs[i], sizes, inputs[i]);
  return sizes;
}

void check_shape(const OpRow& op, const PortRow& port, const Sizes& sizes, const nvinfer1::Dims& dims) {
  check_rank(port, dims.nbDims);
  for (int d = 0; d < port.rank; d++) {
    if (evaluate(op, port.dims[d], sizes) == dims.d[d]) continue;
    throw Fault(std::string(port.name) + " must have the shape " + shape_of(op, port, sizes) + ", found " + text(dims));
  }
}

void output_shapes(const OpRow& op, const FormRow& form, const Attributes& attributes,
                   std::span<const nvinfer1::DimsExprs> inputs, std::span<nvinfer1::DimsExprs> outputs,
                   nvinfer1::IExprBuilder& builder) {
  check_count("inputs", form.inputs.size(), inputs.size());
  check_count("outputs", form.outputs.size(), outputs.size());
  Expressions algebra{op, {}, builder};
  const Sizes known = attribute_sizes(op, attributes);
  for (int i = 0; i < kMaxSizes; i++) {
    if (known[i] != kUnbound) algebra.sizes[i] = algebra.constant(known[i]);
  }
  for (size_t i = 0; i < inputs.size(); i++) {
    const PortRow& port = form.inputs[i];
    check_rank(port, inputs[i].nbDims);
    for (int d = 0; d < port.rank; d++) {
      if (!inputs[i].d[d]) throw Fault(std::string(port.name) + " has a dimension without an expression");
      const int index = plain_size(op, port.dims[d]);
      if (index >= 0 && !algebra.sizes[index]) algebra.sizes[index] = inputs[i].d[d];
    }
  }
  for (size_t i = 0; i < inputs.size(); i++) {
    for (int d = 0; d < form.inputs[i].rank; d++) {
      const auto *wanted = run(op, form.inputs[i].dims[d], algebra), *found = inputs[i].d[d];
      if (!wanted->isConstant() || !found->isConstant()) continue;
      if (wanted->getConstantValue() == found->getConstantValue()) continue;
      throw Fault(std::string(form.inputs[i].name) + ": dimension " + std::to_string(d) + " must be " +
                  std::to_string(wanted->getConstantValue()) + ", found " + std::to_string(found->getConstantValue()));
    }
  }
  for (size_t i = 0; i < outputs.size(); i++) {
    outputs[i].nbDims = form.outputs[i].rank;
    for (int d = 0; d < form.outputs[i].rank; d++) outputs[i].d[d] = run(op, form.outputs[i].dims[d], algebra);
  }
}

std::string text(const nvinfer1::Dims& dims) {
  std::string out = "[";
  for (int i = 0; i < dims.nbDims && i < nvinfer1::Dims::MAX_DIMS; i++) {
    out += (i ? ", " : "") + std::to_string(dims.d[i]);
  }
  return out + "]";
}

}  // namespace flashnext::trt
