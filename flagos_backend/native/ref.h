// Intrusive reference counting: one word, one allocation, and a count that can be asked (donation asks for sole
// ownership).
#ifndef FLAGOS_NATIVE_REF_H_
#define FLAGOS_NATIVE_REF_H_

#include <atomic>
#include <cstdint>
#include <utility>

namespace flagos {

template <class T>
class RefCounted {
 public:
  RefCounted() = default;
  RefCounted(const RefCounted&) = delete;
  RefCounted& operator=(const RefCounted&) = delete;

  void Retain() const noexcept { count_.fetch_add(1, std::memory_order_relaxed); }
  void Release() const noexcept {
    if (count_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete static_cast<const T*>(this);
  }
  // Meaningful when it is one: then the caller's reference is the only one, and nobody else can make another.
  uint32_t ref_count() const noexcept { return count_.load(std::memory_order_acquire); }

 protected:
  ~RefCounted() = default;

 private:
  mutable std::atomic<uint32_t> count_{1};
};

template <class T>
class Ref {
 public:
  Ref() = default;
  Ref(std::nullptr_t) {}
  Ref(const Ref& other) noexcept : pointer_(other.pointer_) {
    if (pointer_) pointer_->Retain();
  }
  Ref(Ref&& other) noexcept : pointer_(std::exchange(other.pointer_, nullptr)) {}
  ~Ref() {
    if (pointer_) pointer_->Release();
  }
  Ref& operator=(Ref other) noexcept {
    std::swap(pointer_, other.pointer_);
    return *this;
  }

  // Takes over the reference that a new object is born with.
  static Ref Adopt(T* pointer) noexcept {
    Ref ref;
    ref.pointer_ = pointer;
    return ref;
  }
  static Ref Share(T* pointer) noexcept {
    if (pointer) pointer->Retain();
    return Adopt(pointer);
  }

  T* get() const noexcept { return pointer_; }
  T* operator->() const noexcept { return pointer_; }
  T& operator*() const noexcept { return *pointer_; }
  explicit operator bool() const noexcept { return pointer_ != nullptr; }
  // Gives the reference to the caller, who must Release it.
  T* Detach() noexcept { return std::exchange(pointer_, nullptr); }
  void Reset() noexcept { *this = Ref(); }

 private:
  T* pointer_ = nullptr;
};

template <class T, class... Arguments>
Ref<T> Make(Arguments&&... arguments) {
  return Ref<T>::Adopt(new T(std::forward<Arguments>(arguments)...));
}

}  // namespace flagos

#endif  // FLAGOS_NATIVE_REF_H_
