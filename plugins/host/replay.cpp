// Runs one recorded launch: replay LAUNCH RESULT. The program that sanitizer builds are linked into.
//
// Every buffer of the launch gets memory of its own, exactly as long as it must be, so a sanitizer sees the first byte
// beyond it. Exits with 0, or with 100 + the launch's status; its message goes to stderr. plugins/replay.py writes and reads the files:
//
//     int64 x 5        bytes of the op's name, bytes of the params, number of buffers, schedule, late_copies
//     uint64, int64    seed, watch
//     name, params
//     per buffer       int64 offset of its pointer in the params, int64 bytes, the bytes
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "abi.h"
#include "host/control.h"

namespace {

constexpr int kStatusBase = 100;

struct Header {
  int64_t name_bytes, params_bytes, buffers, schedule, late_copies;
  uint64_t seed;
  int64_t watch;
};

struct Buffer {
  int64_t offset = 0, bytes = 0;
  void* memory = nullptr;
};

void read(FILE* file, void* to, size_t bytes) {
  if (bytes && fread(to, 1, bytes, file) != bytes) {
    fprintf(stderr, "replay: the launch file ends too early\n");
    exit(2);
  }
}

FILE* open(const char* path, const char* mode) {
  FILE* file = fopen(path, mode);
  if (!file) {
    fprintf(stderr, "replay: cannot open %s\n", path);
    exit(2);
  }
  return file;
}

std::vector<Buffer> read_buffers(FILE* file, int64_t count, char* params) {
  std::vector<Buffer> buffers(static_cast<size_t>(count));
  for (Buffer& buffer : buffers) {
    read(file, &buffer.offset, sizeof buffer.offset);
    read(file, &buffer.bytes, sizeof buffer.bytes);
    buffer.memory = malloc(size_t(buffer.bytes));  // aligned to 16, and not a byte longer
    read(file, buffer.memory, size_t(buffer.bytes));
    memcpy(params + buffer.offset, &buffer.memory, sizeof buffer.memory);
  }
  return buffers;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    fprintf(stderr, "usage: replay LAUNCH RESULT\n");
    return 2;
  }
  FILE* file = open(arguments[1], "rb");
  Header header{};
  read(file, &header, sizeof header);
  std::string name(size_t(header.name_bytes), '\0');
  read(file, name.data(), name.size());
  const auto params = std::make_unique<char[]>(size_t(header.params_bytes));
  read(file, params.get(), size_t(header.params_bytes));
  const std::vector<Buffer> buffers = read_buffers(file, header.buffers, params.get());
  fclose(file);

  simt_configure(int32_t(header.schedule), header.seed, int32_t(header.late_copies));
  simt_watch(int32_t(header.watch));
  const int32_t status = flashnext_launch(name.c_str(), params.get());
  if (status) fprintf(stderr, "replay: %s\n", flashnext_message());

  FILE* result = open(arguments[2], "wb");
  for (const Buffer& buffer : buffers) fwrite(buffer.memory, 1, size_t(buffer.bytes), result);
  uint64_t totals[6];
  simt_counts(totals);
  fwrite(totals, 1, sizeof totals, result);
  fclose(result);
  return status ? kStatusBase + status : 0;  // apart from a sanitizer's own exit codes
}
