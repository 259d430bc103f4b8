// Counting of memory traffic and of conflicts between blocks; see counting.h.
#include "host/counting.h"

#include <bitset>
#include <unordered_map>

#include "host/runtime.h"

namespace simt {

Watch watching = Watch::nothing;

namespace {

constexpr uintptr_t kSector = 32;
constexpr uintptr_t kPageSectors = 128;
constexpr uint32_t kNobody = 0, kSeveral = ~0u;

struct Page {
  std::bitset<kPageSectors> loaded, stored;
};

// Blocks are numbered from 1 here.
struct Byte {
  uint32_t reader = kNobody, writer = kNobody;
};

Counts total;
std::unordered_map<uintptr_t, Page> pages;
std::unordered_map<uintptr_t, Byte> bytes_touched;  // of the running launch
uintptr_t last_number = ~uintptr_t(0);
Page* last_page;

Page& page_of(uintptr_t sector) {
  const uintptr_t number = sector / kPageSectors;
  if (number != last_number) {
    last_page = &pages[number];
    last_number = number;
  }
  return *last_page;
}

void note_sectors(uintptr_t address, size_t bytes, bool store) {
  for (uintptr_t sector = address / kSector; sector <= (address + bytes - 1) / kSector; sector++) {
    Page& page = page_of(sector);
    (store ? page.stored : page.loaded).set(sector % kPageSectors);
  }
}

void check_conflict(uintptr_t address, size_t bytes, bool store) {
  const uint32_t me = uint32_t(block_number()) + 1;
  for (uintptr_t at = address; at < address + bytes; at++) {
    Byte& byte = bytes_touched[at];
    const bool read_elsewhere = byte.reader != kNobody && byte.reader != me;
    const bool written_elsewhere = byte.writer != kNobody && byte.writer != me;
    if (written_elsewhere) fail("two blocks of a launch touch one byte, and one of them writes", Location::current());
    if (store && read_elsewhere) fail("a block writes a byte that another block reads", Location::current());
    if (store) {
      byte.writer = me;
    } else {
      byte.reader = read_elsewhere ? kSeveral : me;
    }
  }
}

}  // namespace

void watch(Watch what) {
  watching = what;
  total = Counts{};
  pages.clear();
  bytes_touched.clear();
  last_number = ~uintptr_t(0);
}

Counts counts() {
  total.loaded_sectors = total.stored_sectors = total.sectors = 0;
  for (const auto& [number, page] : pages) {
    total.loaded_sectors += page.loaded.count();
    total.stored_sectors += page.stored.count();
    total.sectors += (page.loaded | page.stored).count();
  }
  return total;
}

void count_launch() {
  total.launches++;
  bytes_touched.clear();
}

void count_access(const void* pointer, size_t bytes, bool store) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  (store ? total.stored_bytes : total.loaded_bytes) += bytes;
  if (watching == Watch::sectors) note_sectors(address, bytes, store);
  if (watching == Watch::conflicts) check_conflict(address, bytes, store);
}

}  // namespace simt
