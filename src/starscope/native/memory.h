// Zeroed memory straight from the operating system, in pages that exist once they are touched; large ones where it has
// them, because a matrix read through small pages waits for the table of pages as much as for the memory.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>

#include <new>
#include <utility>
#include <vector>

namespace starscope {

class Memory {
  public:
    Memory() = default;
    // std::bad_alloc when there is no room for the addresses.
    explicit Memory(size_t bytes) : bytes_(bytes) {
        if (bytes == 0) return;
        int flags = MAP_PRIVATE | MAP_ANONYMOUS;
#ifdef MAP_NORESERVE
        flags |= MAP_NORESERVE;
#endif
        void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<uint8_t*>(at);
    }
    Memory(Memory&& other) noexcept { *this = std::move(other); }
    Memory& operator=(Memory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~Memory() {
        if (data_ != nullptr) munmap(data_, bytes_);
    }

    uint8_t* data() const { return data_; }
    size_t size() const { return bytes_; }

    // Asks for large pages; for memory that will be used whole.
    void prefer_large_pages() {
#ifdef MADV_HUGEPAGE
        if (data_ != nullptr) madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
    }

    // At least so many bytes; what was in it is lost when it grows.
    void grow(size_t bytes) {
        if (bytes <= bytes_) return;
        *this = Memory();  // the old one first: both at once would be the peak
        *this = Memory(bytes);
    }

  private:
    uint8_t* data_ = nullptr;
    size_t bytes_ = 0;
};

// Many pieces of memory that live as long as the pool: they share large pages, which single ones may be too small for.
class Pool {
  public:
    // A place of `bytes` bytes at a multiple of 64.
    uint8_t* take(size_t bytes) {
        bytes = (bytes + 63) / 64 * 64;
        if (bytes > left_) {
            size_t size = bytes > kBlock ? bytes : kBlock;
            try {
                blocks_.emplace_back(size + kLargePage);
            } catch (const std::bad_alloc&) {  // addresses are limited: no more than is needed now
                size = bytes;
                blocks_.emplace_back(size + kLargePage);
            }
            blocks_.back().prefer_large_pages();
            const size_t past = reinterpret_cast<uintptr_t>(blocks_.back().data()) % kLargePage;
            next_ = blocks_.back().data() + (kLargePage - past) % kLargePage;
            left_ = size;
        }
        uint8_t* taken = next_;
        next_ += bytes;
        left_ -= bytes;
        return taken;
    }

  private:
    static constexpr size_t kBlock = size_t{1} << 30, kLargePage = size_t{2} << 20;
    std::vector<Memory> blocks_;
    uint8_t* next_ = nullptr;
    size_t left_ = 0;
};

}  // namespace starscope
