// A device of torch's PrivateUse1 kind with eight ordinals: memory of its own that is counted and limited, and the CPU's kernels.
//
// An operation runs on CPU tensors that alias the device's memory; what it returns is adopted by the device without a copy.
// A tensor of the CPU among tensors of the device raises as it does on CUDA: 0-dimensional ones are let through, and so are the
// indices of `index` and `index_put`.  Memory that nothing was written to holds NaN.  Everything is synchronous.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <set>
#include <string_view>

namespace at::autocast {
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);  // autocast_mode.h would pull in all of ATen
}

namespace {

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr int ORDINALS = 8;
constexpr size_t ALIGNMENT = 64;

struct Counts {
  std::atomic<int64_t> in_use{0}, peak{0}, limit{int64_t{4} << 30};
};
Counts counts[ORDINALS];
std::atomic<int64_t> operations{0};
thread_local c10::DeviceIndex current = 0;

// ------------------------------------------------------------------------------------------------------------- memory
void charge(c10::DeviceIndex device, size_t size) {
  auto& of = counts[device];
  const int64_t wanted = of.in_use + static_cast<int64_t>(size);
  TORCH_CHECK_WITH(
      OutOfMemoryError, wanted <= of.limit, "sim out of memory. Tried to allocate ", size, " bytes. Device ", int(device),
      " has ", of.limit.load(), " bytes, of which ", of.in_use.load(), " are in use.");
  of.in_use += size;
  if (of.in_use > of.peak) of.peak = of.in_use.load();
}

struct Block {  // what a pointer of the device belongs to: memory of its own, or the adopted result of a CPU kernel
  c10::DeviceIndex device;
  size_t size;
  void* own;
  c10::Storage adopted;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  counts[block->device].in_use -= block->size;
  std::free(block->own);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    const c10::Device device(SIM, current);
    if (size == 0) return {nullptr, nullptr, &c10::detail::deleteNothing, device};
    charge(current, size);
    void* memory = std::aligned_alloc(ALIGNMENT, (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
    std::memset(memory, 0xFF, size);
    return {memory, new Block{current, size, memory, {}}, &release, device};
  }
  void copy_data(void* to, const void* from, size_t size) const override { default_copy_data(to, from, size); }
};
Allocator allocator;
REGISTER_ALLOCATOR(SIM, &allocator);

// ------------------------------------------------------------------------------------------------------------- device
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  c10::Device getDevice() const override { return {SIM, current}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < ORDINALS, "sim: invalid device ordinal ", int(device.index()));
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return ORDINALS; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : c10::GeneratorImpl {  // the CPU's, under the device's name
  explicit Generator(c10::DeviceIndex index, at::Generator of_cpu = at::detail::createCPUGenerator())
      : GeneratorImpl({SIM, index}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), host(std::move(of_cpu)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), host.clone()); }
  at::Generator host;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return ORDINALS; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { Guard().setDevice({SIM, index}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return Guard().exchangeDevice({SIM, index}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static const auto defaults = [] {
      std::vector<at::Generator> made;
      for (c10::DeviceIndex k = 0; k < ORDINALS; ++k) made.push_back(at::make_generator<Generator>(k));
      return made;
    }();
    return defaults[index < 0 ? current : index];
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    at::native::resize_bytes_cpu(storage.unsafeGetStorageImpl(), size);
  }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

// ------------------------------------------------------------------------------------------------- two views of memory
bool on_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIM; }

at::Tensor tensor_of(c10::Storage storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

at::Tensor host(const at::Tensor& tensor) {  // the same memory as a tensor of the CPU, alive for as long as that one is
  if (!on_sim(tensor)) return tensor;
  auto* held = new c10::Storage(tensor.storage());
  c10::DataPtr pointer(
      held->mutable_data(), held, [](void* context) { delete static_cast<c10::Storage*>(context); }, c10::Device(at::kCPU));
  c10::Storage alias(
      c10::Storage::use_byte_size_t(), held->nbytes(), std::move(pointer), c10::GetCPUAllocator(), /*resizable=*/true);
  return tensor_of(std::move(alias), c10::DispatchKey::CPU, tensor);
}

at::Tensor adopted(const at::Tensor& made, c10::Device device) {  // a CPU kernel's result as a tensor of the device
  const size_t size = made.storage().nbytes();
  charge(device.index(), size);
  auto* block = new Block{device.index(), size, nullptr, made.storage()};
  c10::DataPtr pointer(block->adopted.mutable_data(), block, &release, device);
  c10::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(pointer), &allocator, /*resizable=*/true);
  return tensor_of(std::move(storage), c10::DispatchKey::PrivateUse1, made);
}

// ----------------------------------------------------------------------------------------------------------- operations
struct Call {  // one operation: its tensors here and on the CPU, and the device that it runs on
  const c10::OperatorHandle& op;
  std::optional<c10::Device> device;
  std::vector<std::pair<at::Tensor, at::Tensor>> seen, written;

  bool takes_indices_of_cpu(const std::string& argument) const {
    const std::string_view name = op.schema().name();
    return argument == "indices" && (name.find("aten::index") == 0 || name.find("index_put") != name.npos ||
                                     name == "aten::_unsafe_index");
  }

  void meet(const at::Tensor& tensor) {  // notes the device; two of them, or one and the CPU, are refused in `check`
    if (on_sim(tensor) && !device) device = tensor.device();
  }

  void check(const at::Tensor& tensor, const std::string& argument) const {
    if (!tensor.defined() || tensor.device() == *device) return;
    if (tensor.device().type() == at::kCPU && (tensor.dim() == 0 || takes_indices_of_cpu(argument))) return;
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but got ", argument, " is on ", tensor.device(),
        ", different from other tensors on ", *device, " (when checking argument in ", op.schema().name(), ")");
  }

  at::Tensor lowered(const at::Tensor& tensor, const c10::Argument& argument) {
    check(tensor, argument.name());
    if (!on_sim(tensor)) return tensor;
    auto lower = host(tensor);
    seen.emplace_back(tensor, lower);
    if (argument.alias_info() && argument.alias_info()->isWrite()) written.emplace_back(tensor, lower);
    return lower;
  }

  at::Tensor raised(const at::Tensor& result) const {
    if (!result.defined() || result.device().type() != at::kCPU) return result;
    for (const auto& [given, lower] : seen) {
      if (result.is_same(lower)) return given;
      if (result.storage().is_alias_of(lower.storage()))
        return tensor_of(given.storage(), c10::DispatchKey::PrivateUse1, result);
    }
    return adopted(result, *device);
  }

  void write_back() const {  // a kernel may have given an output another size
    for (const auto& [given, lower] : written) {
      if (lower.sizes().equals(given.sizes()) && lower.storage().data() == given.storage().data()) continue;
      at::native::resize_(given, lower.sizes(), std::nullopt);
      host(given).copy_(lower);
    }
  }
};

template <class Each>
void each_tensor(const c10::IValue& value, Each each) {
  if (value.isTensor()) {
    each(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) each(tensor);
  } else if (value.isOptionalTensorList()) {
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) each(*tensor);
  }
}

template <class Map>
c10::IValue mapped(const c10::IValue& value, Map map) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

c10::IValue generator_of_cpu(const c10::IValue& value) {
  const auto given = value.toGenerator();
  TORCH_CHECK(given.device().type() == SIM, "Expected a 'sim' device type for generator but found 'cpu'");
  return static_cast<Generator*>(given.unsafeGetGeneratorImpl())->host;
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ++operations;
  Call call{op, std::nullopt, {}, {}};
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    each_tensor(value, [&](const at::Tensor& tensor) { call.meet(tensor); });
    if (!call.device && value.isDevice() && value.toDevice().type() == SIM) call.device = value.toDevice();
  }
  if (!call.device || !call.device->has_index()) call.device = c10::Device(SIM, current);
  const c10::DeviceGuard guard(*call.device);  // outputs that grow do so on their own device
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto& value = (*stack)[first + i];
    if (value.isDevice())
      value = c10::Device(at::kCPU);
    else if (value.isGenerator())
      value = generator_of_cpu(value);
    else
      value = mapped(value, [&](const at::Tensor& tensor) { return call.lowered(tensor, arguments[i]); });
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.write_back();
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    (*stack)[i] = mapped((*stack)[i], [&](const at::Tensor& tensor) { return call.raised(tensor); });
}

c10::Device chosen(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(SIM, current);
}

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(chosen(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  host(to).copy_(host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  const c10::DeviceGuard guard(on_sim(to) ? to.device() : c10::Device(SIM, current));
  at::native::resize_(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(self.device());
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_whole_storage(at::Tensor& self, c10::Storage source) { return at::native::set_(self, std::move(source)); }

at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups) {
  ++operations;
  const auto lower = bias ? std::optional<at::Tensor>(host(*bias)) : std::nullopt;
  return adopted(
      at::convolution_symint(
          host(input), host(weight), lower, stride, padding, dilation, transposed, output_padding, groups),
      input.device());
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::SymIntArrayRef stride,
    c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef output_padding,
    c10::SymInt groups, std::array<bool, 3> mask) {
  ++operations;
  const std::vector<c10::SymInt> bias_sizes{weight.sym_size(transposed ? 1 : 0) * (transposed ? groups : c10::SymInt(1))};
  auto [of_input, of_weight, of_bias] = at::convolution_backward_symint(
      host(gradient), host(input), host(weight), c10::SymIntArrayRef(bias_sizes), stride, padding, dilation, transposed,
      output_padding, groups, mask);
  auto raised = [&](const at::Tensor& made) { return made.defined() ? adopted(made, input.device()) : made; };
  return {raised(of_input), raised(of_weight), raised(of_bias)};
}

// ------------------------------------------------------------------------------------------------------------- autocast
template <bool lower>
void cast(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(c10::DispatchKey::AutocastPrivateUse1);
  const auto to = lower ? at::autocast::get_autocast_dtype(SIM) : at::kFloat;
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i)
    (*stack)[i] = mapped((*stack)[i], [&](const at::Tensor& tensor) {
      const bool casts = on_sim(tensor) && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
      return casts ? tensor.to(to) : tensor;
    });
  op.callBoxed(stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (auto name : {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "conv1d", "conv2d",
                    "conv3d", "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<true>>());
  for (auto name : {"softmax.int", "log_softmax.int", "layer_norm", "group_norm", "nll_loss", "mse_loss", "cosine_similarity",
                    "logsumexp", "exp", "log", "pow.Tensor_Scalar", "cumsum", "cumprod", "sum", "sum.dim_IntList", "rsqrt"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cast<false>>());
}

template <class Function>
void implement(torch::Library& m, std::set<std::string>& own, const char* name, Function function) {
  m.impl(name, function);
  own.insert(std::string("aten::") + name);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  std::set<std::string> own;
  implement(m, own, "empty.memory_format", &empty);
  implement(m, own, "empty_strided", &empty_strided);
  implement(m, own, "_copy_from", &copy_from);
  implement(m, own, "_copy_from_and_resize", &copy_from_and_resize);
  implement(m, own, "resize_", &resize);
  implement(m, own, "as_strided", &at::native::as_strided_tensorimpl);
  implement(m, own, "view", &view);
  implement(m, own, "_reshape_alias", &reshape_alias);
  implement(m, own, "set_.source_Storage", &set_whole_storage);
  implement(m, own, "set_.source_Storage_storage_offset", &set_storage);
  implement(m, own, "convolution_overrideable", &convolution);
  implement(m, own, "convolution_backward_overrideable", &convolution_backward);
  implement(m, own, "record_stream", [](at::Tensor&, c10::Stream) {});
  // where the CPU has a kernel of its own, other devices would get a composition of others, with other last bits
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || own.count(c10::toString(name)) || !op) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::CPU))
      m.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

// ---------------------------------------------------------------------------------------------- for the Python module
extern "C" {
int64_t sim_in_use(int device) { return counts[device].in_use; }
int64_t sim_peak(int device) { return counts[device].peak; }
void sim_reset_peak(int device) { counts[device].peak = counts[device].in_use.load(); }
int64_t sim_limit(int device) { return counts[device].limit; }
void sim_set_limit(int device, int64_t size) { counts[device].limit = size; }
int sim_device_count() { return ORDINALS; }
int sim_current_device() { return current; }
void sim_set_device(int device) { current = static_cast<c10::DeviceIndex>(device); }
int64_t sim_operations() { return operations; }
}
