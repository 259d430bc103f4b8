// What the rows of op_table_data.h are made of: the op table as the plugins know it. See table.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace flashnext::trt {

// --- dimensions -------------------------------------------------------------------------------------

// One step of a dimension's program, on a stack: push a constant or the size of that number, or combine the upper two.
enum class Step : int8_t { constant, size, add, multiply, divide, end };
struct Code {
  Step step;
  int32_t value;
};
using Program = int16_t;  // index of the first step in the op's code

constexpr int kBatch = 0, kSteps = 1;  // the sizes that every op has, and the only ones that vary within an engine
constexpr int kMaxSizes = 24, kMaxDims = 4, kMaxPorts = 20, kMaxAttributes = 12;

// --- dtypes -----------------------------------------------------------------------------------------

// A type variable of the op, or -1 and a fixed dtype (numbers of common/dtypes.h).
struct Type {
  int8_t variable;
  int8_t fixed;
};
constexpr int kMaxVariables = 2;
// Dtypes of the type variables that there is a kernel for. Where the op has one variable, the second says nothing.
struct Combination {
  int8_t dtypes[kMaxVariables];
};

// --- rows -------------------------------------------------------------------------------------------

enum class Kind : int8_t { integer, number, text };
constexpr int kMaxChoices = 2;

struct AttributeRow {
  const char* name;
  Kind kind;
  int16_t size;    // the size that its value gives, or -1
  int32_t offset;  // of its field in the parameter struct, or -1
  const char* choices[kMaxChoices];  // of a text: the field gets the number
};

struct PortRow {
  const char* name;
  Type type;
  int32_t rank;
  Program dims[kMaxDims];
  int32_t offset;  // of its pointer in the parameter struct
  int32_t alias;   // of a state's output: the input that it continues; -1 otherwise
};

struct SizeField {
  int32_t offset;
  Program value;
};
struct FormatField {
  int32_t offset;
  Type type;
};
struct BoundRow {
  int32_t input;
  Program low, high;
  int32_t addend;  // an input before this one, or -1
  Program sum;     // the largest value of both together
};

struct FormRow {
  const char* name;
  std::span<const PortRow> inputs, outputs;
  std::span<const SizeField> sizes;
  std::span<const FormatField> formats;
  std::span<const BoundRow> bounds;
};

struct OpRow {
  const char* name;    // of the plugin
  const char* kernel;  // of the kernel
  std::span<const char* const> sizes;
  std::span<const Code> code;
  std::span<const AttributeRow> attributes;
  std::span<const Combination> combinations;
  std::span<const FormRow> forms;
  int64_t params_bytes;
  int32_t workspace_offset, stream_offset;
  int32_t counters_offset;  // of the field of counters that live as long as the execution context, or -1
  Program counters;         // how many there are
};

}  // namespace flashnext::trt
