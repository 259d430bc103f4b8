// Lets the process live on when a mapped file becomes shorter, or its disk fails.
//
// A read of a page that its file cannot give raises SIGBUS, in whichever thread and library the read happens (ONNX
// Runtime, PyTorch, rows.cpp). If the file is watched, the handler counts the fault and lays zeros over the mapping
// from that page on; the read is repeated and finds them. So whoever used a file has to ask whether it is damaged
// before he hands out what he made of it (files.py). All other faults go to whoever handled them before.
//
// The handler calls nothing that is not safe in a signal handler: system calls, and reads of what is never freed.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <new>

#define EXPORT extern "C" __attribute__((visibility("default")))
namespace {

const uintptr_t kPage = uintptr_t(sysconf(_SC_PAGESIZE));

// --- what is mapped where ----------------------------------------------------------------------------

// A file as /proc/self/maps names it. fstat names it otherwise on btrfs and overlayfs.
struct Identity {
  uint64_t major = 0, minor = 0, inode = 0;
  bool operator==(const Identity&) const = default;
};

struct Mapping {
  uintptr_t begin = 0, end = 0;
  int protection = 0;
  Identity file;
};

// Lines of /proc/self/maps: `begin-end rwxp offset major:minor inode path`.
class Maps {
 public:
  Maps() : descriptor_(open("/proc/self/maps", O_RDONLY | O_CLOEXEC)) {}
  ~Maps() { close(descriptor_); }
  Maps(const Maps&) = delete;
  Maps& operator=(const Maps&) = delete;

  // The next mapping; false after the last one.
  bool next(Mapping& found) {
    found.begin = number(16);
    found.end = number(16);
    found.protection = get() == 'r' ? PROT_READ : PROT_NONE;
    if (get() == 'w') found.protection |= PROT_WRITE;
    if (get() == 'x') found.protection |= PROT_EXEC;
    get();  // `p` or `s`
    get();  // a blank
    number(16);
    found.file.major = number(16);
    found.file.minor = number(16);
    found.file.inode = number(10);
    while (last_ != '\n' && last_ != kEnd) get();
    return last_ != kEnd;
  }

 private:
  static constexpr int kEnd = -1;

  // The digits up to the next other character, which is taken too.
  uint64_t number(uint64_t base) {
    uint64_t value = 0;
    for (;;) {
      const int c = get();
      const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 16;
      if (digit >= int(base)) return value;
      value = value * base + uint64_t(digit);
    }
  }

  int get() {
    if (at_ == size_) {
      at_ = 0;
      size_ = read(descriptor_, buffer_, sizeof(buffer_));
      if (size_ <= 0) size_ = 0;
    }
    return last_ = at_ < size_ ? buffer_[at_++] : kEnd;
  }

  const int descriptor_;
  unsigned char buffer_[1024];  // a path may hold any byte, of which none is kEnd
  ssize_t at_ = 0, size_ = 0;
  int last_ = 0;
};

bool mapping_at(uintptr_t address, Mapping& found) {
  Maps maps;
  while (maps.next(found)) {
    if (found.begin <= address && address < found.end) return true;
  }
  return false;
}

// Whether a read would succeed: the system reads the address before it finds that the request makes no sense.
bool readable(uintptr_t address) {
  constexpr size_t kSignalSet = 8;
  const uintptr_t set = address / kSignalSet * kSignalSet;
  return syscall(SYS_rt_sigprocmask, ~0, set, nullptr, kSignalSet) == 0 || errno != EFAULT;
}

// --- what is watched ----------------------------------------------------------------------------------

struct WatchedFile {
  std::atomic<bool> watched{false};
  std::atomic<uint64_t> major{0}, minor{0}, inode{0};
  std::atomic<int32_t> descriptor{-1};
  std::atomic<int64_t> size{0}, faults{0};
  WatchedFile* next = nullptr;

  bool is(const Identity& file) const { return watched && Identity{major, minor, inode} == file; }
  bool cut() const { return lseek(descriptor, 0, SEEK_END) < size; }
};

std::atomic<WatchedFile*> first{nullptr};  // of a list that only grows; those no longer watched are used again
std::mutex changing;                       // the list; never taken by the handler

WatchedFile* unused_entry() {
  for (WatchedFile* file = first; file; file = file->next) {
    if (!file->watched) return file;
  }
  WatchedFile* file = new (std::nothrow) WatchedFile;
  if (file) {
    file->next = first;
    first = file;
  }
  return file;
}

bool any_cut() {
  for (const WatchedFile* file = first; file; file = file->next) {
    if (file->watched && file->cut()) return true;
  }
  return false;
}

// --- the handler ----------------------------------------------------------------------------------------

struct sigaction earlier_action;

// Whether the read may be repeated: zeros now lie over what a watched file does not have. They reach to the mapping's
// end, so that a large file costs a few faults and not one per page.
bool covered(uintptr_t address) {
  Mapping mapping;
  bool known = false;
  if (mapping_at(address, mapping) && mapping.file.inode) {
    for (WatchedFile* file = first; file; file = file->next) {
      if (!file->is(mapping.file)) continue;
      file->faults++;
      known = true;
    }
  }
  if (!known) return readable(address);  // another thread was first
  const uintptr_t page = address / kPage * kPage;
  constexpr int kZeros = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
  void* const at = reinterpret_cast<void*>(page);
  return mmap(at, mapping.end - page, mapping.protection, kZeros, -1, 0) != MAP_FAILED;
}

bool survived(const siginfo_t& info) {
  if (info.si_code == BUS_ADRERR) return covered(uintptr_t(info.si_addr));
  // A handler that was installed after this one (such as Python's faulthandler) may have reported the fault, put this
  // one back and raised the signal again: without an address. The read is repeated then, and its fault comes here.
  return info.si_code <= 0 && info.si_pid == getpid() && any_cut();
}

// To whoever handled it before; this handler stays, unless the process is to end.
void pass_on(int signal, siginfo_t* info, void* context) {
  const bool sent = info->si_code <= 0;
  if (earlier_action.sa_flags & SA_SIGINFO) return earlier_action.sa_sigaction(signal, info, context);
  if (earlier_action.sa_handler == SIG_IGN && sent) return;
  if (earlier_action.sa_handler != SIG_DFL && earlier_action.sa_handler != SIG_IGN) {
    return earlier_action.sa_handler(signal);
  }
  sigaction(signal, &earlier_action, nullptr);  // the read is repeated and ends where it would have
  if (sent) raise(signal);                      // nothing would repeat a signal that was sent
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  if (!survived(*info)) pass_on(signal, info, context);
  errno = error;
}

// Installs the handler, also where somebody has removed it since. One that was put over it is left there.
bool install() {
  static bool installed = false;
  struct sigaction now {};
  if (sigaction(SIGBUS, nullptr, &now)) return false;
  const bool is_handler = (now.sa_flags & SA_SIGINFO) || (now.sa_handler != SIG_DFL && now.sa_handler != SIG_IGN);
  if (installed && is_handler) return true;
  struct sigaction action {};
  action.sa_sigaction = on_bus_error;
  action.sa_flags = SA_SIGINFO;
  earlier_action = now;
  return installed = sigaction(SIGBUS, &action, nullptr) == 0;
}

Identity identity_of(int descriptor) {
  void* const at = mmap(nullptr, kPage, PROT_READ, MAP_PRIVATE, descriptor, 0);
  if (at == MAP_FAILED) return {};
  Mapping mapping;
  const bool found = mapping_at(uintptr_t(at), mapping);
  munmap(at, kPage);
  return found ? mapping.file : Identity{};
}

}  // namespace

// Watches a file of so many bytes until `flashnext_unwatch_file`; the descriptor has to stay open as long. Null where
// that cannot be done.
EXPORT WatchedFile* flashnext_watch_file(int32_t descriptor, int64_t size) {
  const std::lock_guard lock(changing);
  const Identity identity = identity_of(descriptor);
  WatchedFile* const file = identity.inode && install() ? unused_entry() : nullptr;
  if (file) {
    file->major = identity.major;
    file->minor = identity.minor;
    file->inode = identity.inode;
    file->descriptor = descriptor;
    file->size = size;
    file->faults = 0;
    file->watched = true;
  }
  return file;
}

EXPORT void flashnext_unwatch_file(WatchedFile* file) { file->watched = false; }

// The first of these files that is shorter than it was, or of which a page could not be read; -1 when all are whole.
EXPORT int64_t flashnext_damaged_file(const WatchedFile* const* files, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    if (files[i]->faults || files[i]->cut()) return i;
  }
  return -1;
}
