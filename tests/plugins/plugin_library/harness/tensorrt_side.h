// TensorRT's own side of the plugin interfaces, as far as plugins can see it: expressions, logger, contexts.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "tensorrt/trt.h"

namespace harness {

// --- expressions ------------------------------------------------------------------------------------

// A dimension that is known when an engine runs: a constant, a variable, or an operation on two others.
class Expression final : public nvinfer1::IDimensionExpr, public nvinfer1::apiv::VDimensionExpr {
 public:
  Expression() { mImpl = this; }
  bool isConstant() const override { return is_constant; }
  int64_t getConstantValue() const override { return value; }
  bool isSizeTensor() const override { return false; }

  bool is_constant = false;
  int64_t value = 0;     // of a constant, or of the variable in the run that is compared with
  bool is_real = true;   // false: made after the builder was told to fail
};

class ExpressionBuilder final : public nvinfer1::IExprBuilder, public nvinfer1::apiv::VExprBuilder {
 public:
  ExpressionBuilder() { mImpl = this; }
  const nvinfer1::IDimensionExpr* constant(int64_t value) override { return made(true, value); }
  const nvinfer1::IDimensionExpr* operation(nvinfer1::DimensionOperation operation,
                                            const nvinfer1::IDimensionExpr& first,
                                            const nvinfer1::IDimensionExpr& second) override {
    const auto &a = static_cast<const Expression&>(first), &b = static_cast<const Expression&>(second);
    operations++;
    return made(a.is_constant && b.is_constant, apply(operation, a.value, b.value));
  }
  const nvinfer1::IDimensionExpr* declareSizeTensor(int32_t, const nvinfer1::IDimensionExpr&,
                                                    const nvinfer1::IDimensionExpr&) override {
    return nullptr;
  }
  const Expression* variable(int64_t value) { return made(false, value); }

  int operations = 0;
  int left = -1;  // expressions until the builder gives nothing; -1: it always gives one

 private:
  const Expression* made(bool is_constant, int64_t value) {
    if (left == 0) return nullptr;
    if (left > 0) left--;
    all_.push_back(std::make_unique<Expression>());
    all_.back()->is_constant = is_constant;
    all_.back()->value = value;
    return all_.back().get();
  }
  static int64_t apply(nvinfer1::DimensionOperation operation, int64_t a, int64_t b) {
    using Operation = nvinfer1::DimensionOperation;
    switch (operation) {
      case Operation::kSUM: return a + b;
      case Operation::kPROD: return a * b;
      case Operation::kFLOOR_DIV: return a / b;
      default: return INT64_MIN;  // the op table has no others
    }
  }
  std::vector<std::unique_ptr<Expression>> all_;
};

// --- logger and context -----------------------------------------------------------------------------

class Logger final : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override {
    count++;
    last_severity = severity;
    snprintf(last, sizeof last, "%s", message);  // takes no memory, which may just be what is missing
  }
  int count = 0;
  Severity last_severity = Severity::kVERBOSE;
  char last[1024] = "";
};

class LoggerFinder final : public nvinfer1::ILoggerFinder {
 public:
  nvinfer1::ILogger* findLogger() override { return &logger; }
  Logger logger;
};

class Context final : public nvinfer1::IPluginResourceContext {
 public:
  nvinfer1::IGpuAllocator* getGpuAllocator() const noexcept override { return nullptr; }
  nvinfer1::IErrorRecorder* getErrorRecorder() const noexcept override { return nullptr; }
};

}  // namespace harness
