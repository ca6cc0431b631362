// NCCL for emulated GPUs: gloo over the same memory. As NCCL, it carries contiguous tensors that lie on a GPU, and no
// others; sums may be means.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Work = c10::intrusive_ptr<c10d::Work>;

// DDP asks for a clock of its device.
class Clock final : public c10d::Timer {
 public:
  explicit Clock(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return 1000; }
  void record(Event event) override { getTimeRef(event) = 1; }
};

Tensor on_host(const Tensor& tensor) {
  TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
  TORCH_CHECK(tensor.is_contiguous(), "Tensors must be contiguous");
  Tensor kept = tensor;  // until the exchange is over
  return at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), [kept](void*) {}, tensor.options().device(at::kCPU));
}

template <class Many>
Many on_host(const Many& all) {
  Many found;
  for (const auto& one : all) found.push_back(on_host(one));
  return found;
}

class Nccl final : public c10d::Backend {
 public:
  Nccl(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) : Backend(rank, size), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }

  Work broadcast(Tensors& all, const c10d::BroadcastOptions& how) override {
    auto here = on_host(all);
    return gloo_->broadcast(here, how);
  }
  Work allreduce(Tensors& all, const c10d::AllreduceOptions& how) override {
    auto here = on_host(all);
    return reduced(here, how, [&](const auto& sum) { return gloo_->allreduce(here, sum); });
  }
  Work allreduce_coalesced(Tensors& all, const c10d::AllreduceCoalescedOptions& how) override {
    auto here = on_host(all);
    return reduced(here, how, [&](const auto& sum) { return gloo_->allreduce_coalesced(here, sum); });
  }
  Work reduce(Tensors& all, const c10d::ReduceOptions& how) override {
    auto here = on_host(all);
    return reduced(here, how, [&](const auto& sum) { return gloo_->reduce(here, sum); });
  }
  Work allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& how) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return gloo_->allgather(to, from, how);
  }
  Work _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& how) override {
    auto to = on_host(out), from = on_host(in);
    return gloo_->_allgather_base(to, from, how);
  }
  Work allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& how) override {
    auto to = on_host(out), from = on_host(in);
    return gloo_->allgather_into_tensor_coalesced(to, from, how);
  }
  Work gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& how) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return gloo_->gather(to, from, how);
  }
  Work scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& how) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return gloo_->scatter(to, from, how);
  }
  Work reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& how) override {
    auto to = on_host(out);
    auto from = on_host(in);
    return reduced(to, how, [&](const auto& sum) { return gloo_->reduce_scatter(to, from, sum); });
  }
  Work _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& how) override {
    auto to = on_host(out), from = on_host(in);
    return reduced({to}, how, [&](const auto& sum) { return gloo_->_reduce_scatter_base(to, from, sum); });
  }
  Work reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& how) override {
    auto to = on_host(out), from = on_host(in);
    return reduced(to, how, [&](const auto& sum) { return gloo_->reduce_scatter_tensor_coalesced(to, from, sum); });
  }
  Work alltoall_base(
      Tensor& out, Tensor& in, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
      const c10d::AllToAllOptions& how) override {
    auto to = on_host(out), from = on_host(in);
    return gloo_->alltoall_base(to, from, to_sizes, from_sizes, how);
  }
  Work alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& how) override {
    auto to = on_host(out), from = on_host(in);
    return gloo_->alltoall(to, from, how);
  }
  Work send(Tensors& all, int to, int tag) override {
    auto here = on_host(all);
    return gloo_->send(here, to, tag);
  }
  Work recv(Tensors& all, int from, int tag) override {
    auto here = on_host(all);
    return gloo_->recv(here, from, tag);
  }
  Work barrier(const c10d::BarrierOptions& how) override {
    auto anywhere = how;
    anywhere.device_ids.clear();
    anywhere.device = std::nullopt;
    return gloo_->barrier(anywhere);
  }
  void setSequenceNumberForGroup() override { gloo_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo_->getSequenceNumberForGroup(); }
  void abort() override { gloo_->abort(); }
  void shutdown() override { gloo_->shutdown(); }

 private:
  // gloo knows no mean: its sum, divided.
  template <class How, class Ask>
  Work reduced(Tensors results, const How& how, Ask ask) {
    if (how.reduceOp != c10d::ReduceOp::AVG) return ask(how);
    How sum = how;
    sum.reduceOp = c10d::ReduceOp::SUM;
    Work work = ask(sum);
    work->wait();
    for (auto& one : results) one.div_(getSize());
    return work;
  }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, Clock)
}

PYBIND11_MODULE(emulated_nccl, module) {
  py::module_::import("torch._C._distributed_c10d");
  module.def(
      "over",
      [](int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<Nccl>(rank, size, gloo);
      },
      "A backend that carries GPUs' tensors by a gloo backend of the same ranks.");
}
