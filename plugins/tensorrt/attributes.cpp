// Reads plugin fields. TensorRT's ONNX parser gives an integer as INT32, a float as FLOAT32, a string as CHAR with a
// terminating zero; other callers give INT64 or FLOAT64, or no zero.
#include "tensorrt/attributes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "tensorrt/log.h"
#include "tensorrt/op_table_data.h"

namespace flashnext::trt {
namespace {

using nvinfer1::PluginField;
using FieldType = nvinfer1::PluginFieldType;

constexpr char kForm[] = "form", kAliased[] = "aliased", kVersion[] = "op_version", kDigest[] = "op_table";
constexpr int32_t kMaxFields = 64, kMaxText = 256;

// Texts come from files: what is no printable ASCII becomes a question mark.
std::string quoted(std::string text) {
  std::replace_if(text.begin(), text.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return "'" + text + "'";
}

[[noreturn]] void wrong_type(const PluginField& field, const char* wanted) {
  throw Fault("attribute " + quoted(field.name) + " must be " + wanted + ", found field type " +
              std::to_string(int32_t(field.type)) + " with " + std::to_string(field.length) + " entries");
}

template <class T>
T at(const void* data) {
  T value;
  memcpy(&value, data, sizeof value);  // fields need not be aligned
  return value;
}

int32_t integer(const PluginField& field) {
  const bool is_short = field.type == FieldType::kINT32, is_long = field.type == FieldType::kINT64;
  if ((!is_short && !is_long) || field.length != 1) wrong_type(field, "one INT32 or INT64");
  const int64_t value = is_short ? at<int32_t>(field.data) : at<int64_t>(field.data);
  if (value < 0 || value > INT32_MAX) {
    throw Fault("attribute " + quoted(field.name) + " must be from 0 to 2147483647, found " + std::to_string(value));
  }
  return int32_t(value);
}

float number(const PluginField& field) {
  const bool is_short = field.type == FieldType::kFLOAT32, is_long = field.type == FieldType::kFLOAT64;
  if ((!is_short && !is_long) || field.length != 1) wrong_type(field, "one FLOAT32 or FLOAT64");
  const float value = is_short ? at<float>(field.data) : float(at<double>(field.data));
  if (!std::isfinite(value)) throw Fault("attribute " + quoted(field.name) + " is not finite");
  return value;
}

std::string text(const PluginField& field) {
  if (field.type != FieldType::kCHAR || field.length < 0 || field.length > kMaxText) wrong_type(field, "CHARs");
  std::string value(static_cast<const char*>(field.data), size_t(field.length));
  while (!value.empty() && value.back() == '\0') value.pop_back();
  return value;
}

template <class Rows, class Name>
std::string listed(const Rows& rows, Name name) {
  std::string out;
  for (const auto& row : rows) out += (out.empty() ? "" : ", ") + std::string(name(row));
  return out;
}

Value read(const AttributeRow& row, const PluginField& field) {
  Value value;
  if (row.kind == Kind::integer) value.integer = integer(field);
  if (row.kind == Kind::number) value.number = number(field);
  if (row.kind == Kind::integer && row.size >= 0 && value.integer == 0) {
    throw Fault("attribute " + quoted(row.name) + " must be positive, found 0");
  }
  if (row.kind == Kind::text) {
    value.text = text(field);
    const auto found = std::find(std::begin(row.choices), std::end(row.choices), value.text);
    if (found == std::end(row.choices)) {
      const auto name = [](const char* choice) { return choice; };
      throw Fault("attribute " + quoted(row.name) + " must be one of " + listed(row.choices, name) + ", found " +
                  quoted(value.text));
    }
    value.integer = int32_t(found - std::begin(row.choices));
  }
  return value;
}

const FieldType kTypes[] = {FieldType::kINT32, FieldType::kFLOAT32, FieldType::kCHAR};

}  // namespace

Attributes::Attributes(const OpRow& op, const nvinfer1::PluginFieldCollection* fields, bool from_plan) : op_(&op) {
  if (!fields || fields->nbFields < 0 || fields->nbFields > kMaxFields || (fields->nbFields && !fields->fields)) {
    throw Fault("the creator was given no valid collection of fields");
  }
  std::vector<std::string> seen;
  for (int32_t i = 0; i < fields->nbFields; i++) take(op, fields->fields[i], seen);
  std::string missing;
  const auto require = [&](const std::string& name) {
    if (std::find(seen.begin(), seen.end(), name) == seen.end()) missing += (missing.empty() ? "" : ", ") + name;
  };
  require(kForm);
  for (const AttributeRow& row : op.attributes) require(row.name);
  if (from_plan) require(kVersion), require(kDigest);
  if (!missing.empty()) throw Fault("attributes are missing: " + missing);
  if (from_plan) check_plan();
}

void Attributes::take(const OpRow& op, const PluginField& field, std::vector<std::string>& seen) {
  if (!field.name) throw Fault("a field has no name");
  const std::string name = field.name;
  if (std::find(seen.begin(), seen.end(), name) != seen.end()) {
    throw Fault("attribute " + quoted(name) + " comes twice");
  }
  if (!field.data) throw Fault("attribute " + quoted(name) + " has no data");
  seen.push_back(name);
  if (name == kForm) return take_form(op, field);
  if (name == kVersion) return void(version_ = integer(field));
  if (name == kDigest) return void(digest_ = text(field));
  if (name == kAliased) {
    aliased_ = integer(field);
    if (aliased_ > 1) throw Fault("attribute 'aliased' must be 0 or 1, found " + std::to_string(aliased_));
    return;
  }
  for (size_t i = 0; i < op.attributes.size(); i++) {
    if (name == op.attributes[i].name) return void(values_[i] = read(op.attributes[i], field));
  }
  throw Fault("there is no attribute " + quoted(name) + "; those of this op are form, aliased, " +
              listed(op.attributes, [](const AttributeRow& row) { return row.name; }));
}

void Attributes::take_form(const OpRow& op, const PluginField& field) {
  const std::string name = text(field);
  for (const FormRow& row : op.forms) {
    if (name == row.name) form_ = &row;
  }
  if (form_) return;
  throw Fault("attribute 'form' must be one of " + listed(op.forms, [](const FormRow& row) { return row.name; }) +
              ", found " + quoted(name));
}

void Attributes::check_plan() const {
  if (version_ == kOpVersion && digest_ == kTableDigest) return;
  throw Fault("the engine was built with version " + std::to_string(version_) + " of the ops (table " +
              quoted(digest_) + "), this library has version " + std::to_string(kOpVersion) + " (table " +
              quoted(kTableDigest) + "). Build the engine again, or load the library that it was built with");
}

std::vector<PluginField> Attributes::fields() const {
  static const int32_t version = kOpVersion;
  std::vector<PluginField> out;
  out.emplace_back(kForm, form_->name, FieldType::kCHAR, int32_t(strlen(form_->name)) + 1);
  out.emplace_back(kAliased, &aliased_, FieldType::kINT32, 1);
  out.emplace_back(kVersion, &version, FieldType::kINT32, 1);
  out.emplace_back(kDigest, kTableDigest, FieldType::kCHAR, int32_t(sizeof kTableDigest));
  for (size_t i = 0; i < op_->attributes.size(); i++) {
    const AttributeRow& row = op_->attributes[i];
    const Value& value = values_[i];
    const void* data = &value.integer;
    if (row.kind == Kind::number) data = &value.number;
    if (row.kind == Kind::text) data = value.text.c_str();
    const int32_t length = row.kind == Kind::text ? int32_t(value.text.size()) + 1 : 1;
    out.emplace_back(row.name, data, kTypes[int(row.kind)], length);
  }
  return out;
}

std::vector<PluginField> field_names(const OpRow& op) {
  std::vector<PluginField> out;
  out.emplace_back(kForm, nullptr, FieldType::kCHAR, 1);
  out.emplace_back(kAliased, nullptr, FieldType::kINT32, 1);
  for (const AttributeRow& row : op.attributes) out.emplace_back(row.name, nullptr, kTypes[int(row.kind)], 1);
  return out;
}

}  // namespace flashnext::trt
