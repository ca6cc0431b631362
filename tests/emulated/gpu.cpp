// Loaded before a CPU build of torch, this gives it GPUs: "cuda:0" and on, whose memory is the host's and whose
// operators are the CPU's. They compute, and refuse what a GPU refuses: tensors of two devices in one operator, a look at
// memory without a copy, collectives over host memory (nccl.cpp). What is held is counted as CUDA's allocator would.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <mutex>
#include <set>

namespace emulated {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

int num_devices() {
  static const int count = [] {
    const char* said = std::getenv("EMULATED_GPUS");
    return said ? std::atoi(said) : 1;
  }();
  return count;
}

thread_local DeviceIndex current = 0;

class Guard final : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
 public:
  DeviceIndex deviceCount() const noexcept override { return num_devices(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, current); }
  Device exchangeDevice(Device device) const override {
    Device old(DeviceType::CUDA, current);
    current = device.index();
    return old;
  }
  void setDevice(Device device) const override { current = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Stream getStream(Device device) const noexcept override { return Stream(Stream::DEFAULT, device); }
  Stream getNewStream(Device device, int) const override { return Stream(Stream::DEFAULT, device); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const noexcept override { return stream; }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override { *event = &marker_; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}

 private:
  static inline char marker_ = 0;
};

// Memory of each device, counted. CUDA's caching allocator rounds as here; what it keeps in pieces is not shown.
constexpr int kMost = 16;
std::atomic<int64_t> held[kMost], peak[kMost];
struct Block {
  void* data;
  size_t size;
  int device;
};

size_t rounded(size_t size) { return (size + 511) / 512 * 512; }

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held[block->device] -= block->size;
  std::free(block->data);
  delete block;
}

class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    int device = current;
    size_t taken = rounded(size);
    void* data = taken ? std::aligned_alloc(512, taken) : nullptr;
    auto now = held[device] += taken;
    auto most = peak[device].load();
    while (now > most && !peak[device].compare_exchange_weak(most, now)) {
    }
    return {data, new Block{data, taken, device}, &release, Device(DeviceType::CUDA, device)};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};
Memory memory;

// Pinned memory of the host: torch asks whether an address lies in it.
std::mutex pinned_lock;
std::set<std::pair<uintptr_t, uintptr_t>> pinned;
struct PinnedBlock {
  void* data;
  size_t size;
};

void release_pinned(void* context) {
  auto* block = static_cast<PinnedBlock*>(context);
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto from = reinterpret_cast<uintptr_t>(block->data);
    pinned.erase({from, from + block->size});
  }
  std::free(block->data);
  delete block;
}
class PinnedMemory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    size_t taken = rounded(size);
    void* data = taken ? std::aligned_alloc(512, taken) : nullptr;
    auto from = reinterpret_cast<uintptr_t>(data);
    if (data) {
      std::lock_guard<std::mutex> guard(pinned_lock);
      pinned.insert({from, from + taken});
    }
    return {data, new PinnedBlock{data, taken}, &release_pinned, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
};
PinnedMemory pinned_memory;

// Random numbers: a CPU's generator behind each device, apart from the host's own.
struct Draws final : public c10::GeneratorImpl {
  explicit Draws(DeviceIndex index)
      : c10::GeneratorImpl(Device(DeviceType::CUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inner(at::detail::createCPUGenerator(67280421310721ull)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  Draws* clone_impl() const override {
    auto* made = new Draws(device().index());
    made->inner = inner.clone();
    return made;
  }
  mutable at::Generator inner;
};
at::Generator& default_draws(DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMost; ++i) made.push_back(at::make_generator<Draws>(i));
    return made;
  }();
  return all[index < 0 ? current : index];
}

class Hooks final : public at::CUDAHooksInterface {
 public:
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return num_devices(); }
  int getNumGPUs() const override { return num_devices(); }
  DeviceIndex current_device() const override { return current; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = index; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override { auto old = current; current = index; return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override { return default_draws(index); }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Draws>(index < 0 ? current : index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  at::Allocator* getCUDADeviceAllocator() const override { return &memory; }
  bool isPinnedPtr(const void* data) const override {
    auto at = reinterpret_cast<uintptr_t>(data);
    std::lock_guard<std::mutex> guard(pinned_lock);
    auto found = pinned.upper_bound({at, UINTPTR_MAX});
    return found != pinned.begin() && at < (--found)->second;
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, current); }
};

// Operators: views and memory are made here, all others computed by the CPU's kernels on copies.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  auto alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  if (tensor.is_conj()) alias._set_conj(true);  // said by a bit; the memory is as it was
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

struct OnDevice {
  DeviceIndex old = current;
  explicit OnDevice(std::optional<Device> device) { if (device && device->has_index()) current = device->index(); }
  ~OnDevice() { current = old; }
};

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  OnDevice guard(device);
  return at::detail::empty_generic(size, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   at::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  OnDevice guard(device);
  return at::detail::empty_strided_generic(size, stride, &memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           at::dtype_or_default(dtype));
}
Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  on_host(self).copy_(on_host(source));
  return self;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  if (to.sizes() != self.sizes()) const_cast<Tensor&>(to).resize_(self.sizes());
  const_cast<Tensor&>(to).copy_(self);
  return to;
}
at::Scalar local_scalar(const Tensor& self) { return at::_local_scalar_dense(on_host(self)); }

bool takes_host_tensors(const std::string& name) {
  static const std::set<std::string> known{"aten::index", "aten::_index_put_impl_", "aten::index_put_", "aten::copy_",
                                           "aten::_copy_from_and_resize", "aten::index_put", "aten::_unsafe_index"};
  return known.count(name);
}

void check_same_device(const c10::OperatorHandle& op, const torch::jit::Stack& stack, size_t begin) {
  if (takes_host_tensors(op.schema().name())) return;
  std::optional<Device> first;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined() || (tensor.dim() == 0 && tensor.is_cpu())) return;
    if (!first) first = tensor.device();
    TORCH_CHECK(*first == tensor.device(), "Expected all tensors to be on the same device, but found ",
                *first, " and ", tensor.device(), "! (in ", op.schema().name(), ")");
  };
  for (size_t i = begin; i < stack.size(); ++i) {
    if (stack[i].isTensor()) look(stack[i].toTensor());
    else if (stack[i].isTensorList()) for (const Tensor& tensor : stack[i].toTensorVector()) look(tensor);
    else if (stack[i].isOptionalTensorList())
      for (const auto& tensor : stack[i].toOptionalTensorVector()) if (tensor) look(*tensor);
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  size_t begin = stack->size() - arguments.size();
  check_same_device(op, *stack, begin);
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isGenerator()) {
      auto said = value.toGenerator();
      TORCH_CHECK(said.device().is_cuda(), "Expected a generator of a 'cuda' device, but found '", said.device(), "'");
      value = static_cast<Draws*>(said.unsafeGetGeneratorImpl())->inner;
    } else if (arguments[i].name() == "generator" && value.isNone()) {
      value = static_cast<Draws*>(default_draws(-1).unsafeGetGeneratorImpl())->inner;
    }
  }
  at::native::cpu_fallback(op, stack, true);
}

// As CUDA builds choose from Ampere on: FlashAttention in half precision without a mask, grouped heads or not; else the
// memory-efficient kernel, which knows no grouped heads; else the definition, which keeps all scores.
bool is_fused(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
              double dropout, bool grouped) {
  bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  static const char* capability = std::getenv("EMULATED_CAPABILITY");
  bool flash = (!capability || std::atof(capability) >= 8) && half && !(mask && mask->defined()) && query.size(-1) <= 256 && query.size(-1) == value.size(-1);
  return query.dim() == 4 && dropout == 0 && (flash || !grouped || query.size(1) == key.size(1));
}
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
              double dropout, bool causal, std::optional<double> scale, bool grouped) {
  auto added = mask;
  if (mask && mask->defined() && mask->scalar_type() == at::kBool)
    added = at::zeros_like(*mask, query.options()).masked_fill(mask->logical_not(), -INFINITY);
  if (is_fused(query, key, value, mask, dropout, grouped)) {  // what is kept is the same for the CPU's kernel
    auto filled = at::constant_pad_nd(value, {0, query.size(-1) - value.size(-1)});
    auto out = at::_scaled_dot_product_flash_attention_for_cpu(
        query, key, value.size(-1) == query.size(-1) ? value : filled, 0, causal, added, scale);
    return std::get<0>(out).narrow(-1, 0, value.size(-1));
  }
  return std::get<0>(
      at::_scaled_dot_product_attention_math(query, key, value, added, dropout, causal, {}, scale, grouped));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &at::native::set_cpu_);
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", &attend); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) { m.impl("scaled_dot_product_attention", &attend); }

struct Start {
  Start() { c10::SetAllocator(DeviceType::CUDA, &memory, 255); }
} start;

}  // namespace emulated

using EmulatedGuard = emulated::Guard;
C10_REGISTER_GUARD_IMPL(CUDA, EmulatedGuard)

namespace at {
using EmulatedHooks = ::emulated::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmulatedHooks)
namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
}  // namespace accelerator
}  // namespace at

extern "C" {
int64_t emulated_held(int device) { return emulated::held[device]; }
int64_t emulated_peak(int device) { return emulated::peak[device]; }
void emulated_reset_peak(int device) { emulated::peak[device] = emulated::held[device].load(); }
int emulated_current() { return emulated::current; }
void emulated_set_current(int device) { emulated::current = device; }
void emulated_seed(uint64_t seed) {
  for (int i = 0; i < emulated::num_devices(); ++i) emulated::default_draws(i).set_current_seed(seed);
}
int64_t emulated_state(int device, void* to) {
  auto state = emulated::default_draws(device).get_state();
  if (to) std::memcpy(to, state.data_ptr(), state.nbytes());
  return state.nbytes();
}
void emulated_set_state(int device, void* from, int64_t size) {
  emulated::default_draws(device).set_state(at::from_blob(from, {size}, at::kByte).clone());
}
void emulated_resize(void* storage, uint64_t size) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  emulated::OnDevice guard(impl->device());
  at::native::resize_bytes_cpu(impl, size);
}
int emulated_pin(uint64_t at, uint64_t size) {
  std::lock_guard<std::mutex> guard(emulated::pinned_lock);
  return emulated::pinned.insert({at, at + size}).second ? 0 : 712;
}
int emulated_unpin(uint64_t at) {
  std::lock_guard<std::mutex> guard(emulated::pinned_lock);
  auto found = emulated::pinned.lower_bound({at, 0});
  if (found == emulated::pinned.end() || found->first != at) return 713;
  emulated::pinned.erase(found);
  return 0;
}
}  // extern "C"
