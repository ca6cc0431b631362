// Loaded before a CPU build of torch, this lets tensors on "cuda:0" pass its dispatcher and its autograd engine. Nothing
// is computed and nothing waits: whoever uses it holds fake tensors only (mode.py).
//
// A CPU build refuses such tensors in three places: no device guard is registered for CUDA, the hooks say that there is
// no CUDA, and the engine finds no accelerator whose streams it could order.
#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

const Device kOnlyDevice(DeviceType::CUDA, 0);
const Stream kOnlyStream(Stream::DEFAULT, kOnlyDevice);

// The no-op guard of torch answers -1 as the current device; the engine takes that for a place in a list.
class OneDeviceGuard final : public c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
 public:
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return kOnlyDevice; }
  Device exchangeDevice(Device) const override { return kOnlyDevice; }
  Stream getStream(Device) const noexcept override { return kOnlyStream; }
  Stream getNewStream(Device, int) const override { return kOnlyStream; }
  Stream exchangeStream(Stream) const noexcept override { return kOnlyStream; }
  void record(void** event, const Stream&, DeviceIndex, c10::EventFlag) const override { *event = &marker_; }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, DeviceIndex) const noexcept override {}

 private:
  static inline char marker_ = 0;  // an event that was recorded is not null
};

class OneDeviceHooks final : public at::CUDAHooksInterface {
 public:
  explicit OneDeviceHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, OneDeviceGuard)

namespace at {
using ::OneDeviceHooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, OneDeviceHooks)  // by the name that torch asks for

// Found before torch's own function of this name, because this library is loaded first.
namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return DeviceType::CUDA; }
}  // namespace accelerator
}  // namespace at
