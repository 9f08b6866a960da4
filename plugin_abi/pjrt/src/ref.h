// Reference counts: clients, events, buffers and executables outlive the PJRT call that destroys them while something
// else, a callback in flight for instance, still needs them.
#ifndef FLAGOS_PJRT_REF_H_
#define FLAGOS_PJRT_REF_H_

#include <atomic>
#include <cstdint>
#include <utility>

namespace flagos_pjrt {

class RefCounted {
 public:
  RefCounted() = default;
  RefCounted(const RefCounted&) = delete;
  RefCounted& operator=(const RefCounted&) = delete;

  void Retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  // False when the last reference is gone already, and the object about to be.
  bool TryRetain() {
    int64_t references = references_.load(std::memory_order_relaxed);
    while (references > 0) {
      if (references_.compare_exchange_weak(references, references + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }
  // Whether that was the last one.
  bool Drop() { return references_.fetch_sub(1, std::memory_order_acq_rel) == 1; }

 protected:
  ~RefCounted() = default;

 private:
  std::atomic<int64_t> references_{1};
};

template <typename T>
void Release(T* object) {
  if (object != nullptr && object->Drop()) delete object;
}

template <typename T>
class Ref {
 public:
  Ref() = default;
  // Takes over the caller's reference.
  static Ref Adopt(T* object) { return Ref(object); }
  static Ref Share(T* object) {
    if (object != nullptr) object->Retain();
    return Ref(object);
  }
  Ref(const Ref& other) : Ref(Share(other.object_)) {}
  Ref(Ref&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  ~Ref() { Release(object_); }

  T* get() const { return object_; }
  T* operator->() const { return object_; }
  T& operator*() const { return *object_; }
  explicit operator bool() const { return object_ != nullptr; }
  // Gives the reference to the caller.
  T* Leak() { return std::exchange(object_, nullptr); }

 private:
  explicit Ref(T* object) : object_(object) {}
  T* object_ = nullptr;
};

}  // namespace flagos_pjrt

#endif  // FLAGOS_PJRT_REF_H_
