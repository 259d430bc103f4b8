// A case: a plugin's fields, a profile, and calls with their tensors. harness.py writes the files.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tensorrt/trt.h"

namespace harness {

struct Field {
  std::string name, data;
  int32_t type = 0, length = 0;
};

struct Tensor {
  int32_t type = 0;
  std::vector<int64_t> dims;
  std::string data;  // empty for outputs that start unwritten
  int64_t bytes = 0;
};

// One step: all inputs, and what shapes and types its outputs are to have.
struct Step {
  std::vector<Tensor> inputs, outputs;
};

struct Case {
  std::string op;
  std::vector<Field> fields;
  std::vector<int64_t> aliases;               // of every output: its input, or -1
  std::vector<std::vector<int64_t>> least, most;  // shapes of the inputs at the ends of the profile
  int64_t in_place = 1;
  std::vector<Step> steps;
};

class Reader {
 public:
  explicit Reader(const char* path) : file_(fopen(path, "rb")) {
    if (!file_) die("cannot open the case");
  }
  ~Reader() { fclose(file_); }
  int64_t number() {
    int64_t value = 0;
    bytes(&value, sizeof value);
    return value;
  }
  std::string text() {
    std::string value(size_t(number()), '\0');
    bytes(value.data(), value.size());
    return value;
  }
  std::vector<int64_t> numbers() {
    std::vector<int64_t> out(static_cast<size_t>(number()));
    for (int64_t& value : out) value = number();
    return out;
  }

 private:
  void bytes(void* to, size_t count) {
    if (count && fread(to, 1, count, file_) != count) die("the case ends too early");
  }
  [[noreturn]] static void die(const char* why) {
    fprintf(stderr, "harness: %s\n", why);
    exit(2);
  }
  FILE* file_;
};

inline Tensor read_tensor(Reader& from) {
  Tensor tensor;
  tensor.type = int32_t(from.number());
  tensor.dims = from.numbers();
  tensor.bytes = from.number();
  tensor.data = from.text();
  return tensor;
}

inline Case read_case(const char* path) {
  Reader from(path);
  Case out;
  out.op = from.text();
  for (int64_t left = from.number(); left > 0; left--) {
    Field field;
    field.name = from.text();
    field.type = int32_t(from.number());
    field.length = int32_t(from.number());
    field.data = from.text();
    out.fields.push_back(field);
  }
  out.aliases = from.numbers();
  const int64_t inputs = from.number();
  for (int64_t i = 0; i < inputs; i++) {
    out.least.push_back(from.numbers());
    out.most.push_back(from.numbers());
  }
  out.in_place = from.number();
  for (int64_t left = from.number(); left > 0; left--) {
    Step step;
    for (int64_t i = 0; i < inputs; i++) step.inputs.push_back(read_tensor(from));
    for (size_t i = 0; i < out.aliases.size(); i++) step.outputs.push_back(read_tensor(from));
    out.steps.push_back(step);
  }
  return out;
}

inline nvinfer1::Dims dims_of(const std::vector<int64_t>& sizes) {
  nvinfer1::Dims dims{};
  dims.nbDims = int32_t(sizes.size());
  for (size_t i = 0; i < sizes.size(); i++) dims.d[i] = sizes[i];
  return dims;
}

}  // namespace harness
