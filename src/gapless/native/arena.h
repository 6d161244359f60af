// Memory that is taken in small pieces and given back all at once.
//
// Many automata grow at the same time on several threads. malloc would ask the system for memory again and again, and all
// threads of the process would wait. An arena takes chunks from a pool, and the pool keeps those that come back.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace gapless {

constexpr size_t CHUNK_BYTES = 32 << 10, SLAB_BYTES = 4 << 20;

class ChunkPool {
  public:
    std::byte* take() {
        const std::lock_guard<std::mutex> hold(lock_);
        if (free_.empty()) {
            slabs_.emplace_back(new std::byte[SLAB_BYTES]);
            for (size_t at = 0; at < SLAB_BYTES; at += CHUNK_BYTES) free_.push_back(slabs_.back().get() + at);
        }
        std::byte* const found = free_.back();
        free_.pop_back();
        return found;
    }

    void give_back(const std::vector<std::byte*>& chunks) {
        const std::lock_guard<std::mutex> hold(lock_);
        free_.insert(free_.end(), chunks.begin(), chunks.end());
    }

  private:
    std::mutex lock_;
    std::vector<std::unique_ptr<std::byte[]>> slabs_;
    std::vector<std::byte*> free_;
};

class Arena {
  public:
    explicit Arena(std::shared_ptr<ChunkPool> pool) : pool_(std::move(pool)) {}
    ~Arena() { pool_->give_back(chunks_); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    // Room for so many values that need no destructor. They are not made.
    template <class Value>
    Value* take(size_t count) {
        const size_t size = (count * sizeof(Value) + 7) / 8 * 8;
        if (size > CHUNK_BYTES / 2) {
            large_.emplace_back(new std::byte[size]);
            return reinterpret_cast<Value*>(large_.back().get());
        }
        if (chunks_.empty() || used_ + size > CHUNK_BYTES) {
            chunks_.push_back(pool_->take());
            used_ = 0;
        }
        used_ += size;
        return reinterpret_cast<Value*>(chunks_.back() + used_ - size);
    }

  private:
    const std::shared_ptr<ChunkPool> pool_;
    std::vector<std::byte*> chunks_;
    std::vector<std::unique_ptr<std::byte[]>> large_;
    size_t used_ = 0;  // of the last chunk
};

}  // namespace gapless
