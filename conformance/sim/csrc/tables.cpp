// Operators on lists of tensors whose CUDA kernels need memory of their own: tables of addresses and sizes, which they
// upload, or a buffer. It is free again when the kernel is queued.
// https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/TensorShape.cu
// https://github.com/pytorch/pytorch/blob/v2.13.0/aten/src/ATen/native/cuda/ForeachReduceOp.cu
#include <ATen/OpMathType.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_chunk_cat.h>
#include <ATen/ops/_foreach_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/split_with_sizes_copy.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>

#include "allocator.h"
#include "kernels.h"

namespace sim {

namespace {

constexpr int64_t kTileBytes = 128 * 16; // of a block of threads: BLOCK_SIZE * BYTES_PER_THREAD
constexpr int64_t kNormChunk = 65536; // elements: kChunkSize in ATen/native/cuda/MultiTensorApply.cuh

int64_t div_up(int64_t dividend, int64_t divisor) {
  return (dividend + divisor - 1) / divisor;
}

bool are_dense(at::TensorList tensors) {
  return std::all_of(
      tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.is_non_overlapping_and_dense(); });
}

bool are_of(at::TensorList tensors, at::ScalarType dtype) {
  return std::all_of(
      tensors.begin(), tensors.end(), [dtype](const auto& tensor) { return tensor.scalar_type() == dtype; });
}

// Addresses of both sides and sizes by tensor, the tensor of each tile, and the first tile of each tensor and its end.
int64_t numbers_to_split(const at::Tensor& self, at::IntArrayRef sizes, int64_t dim) {
  int64_t tiles = 0;
  for (int64_t size : sizes) tiles += div_up(size * self.stride(dim) * self.element_size(), kTileBytes);
  return 4 * static_cast<int64_t>(sizes.size()) + 1 + tiles;
}

// Bytes of a tensor's chunk, padded, in the dtype of the result.
int64_t chunk_bytes(const at::Tensor& tensor, int64_t dim, int64_t chunks, int64_t element_bytes) {
  int64_t bytes = div_up(tensor.size(dim), chunks) * element_bytes;
  for (int64_t inner = dim + 1; inner < tensor.dim(); ++inner) bytes *= tensor.size(inner);
  return bytes;
}

// Address, size, size of a chunk and its number of tiles by tensor, the tensor of each tile, and where each tensor begins
// and ends, in bytes and in tiles.
int64_t numbers_to_concatenate(at::TensorList tensors, int64_t dim, int64_t chunks, int64_t element_bytes) {
  int64_t tiles = 0;
  for (const auto& tensor : tensors) tiles += div_up(chunk_bytes(tensor, dim, chunks, element_bytes), kTileBytes);
  return 6 * static_cast<int64_t>(tensors.size()) + 2 + tiles;
}

void split_with_sizes_copy_out(
    const at::Tensor& self, at::IntArrayRef sizes, int64_t dim, at::TensorList out) {
  dim = c10::maybe_wrap_dim(dim, self.dim());
  auto shape = self.sizes().vec();
  for (size_t i = 0; i < out.size() && i < sizes.size(); ++i) {
    shape[dim] = sizes[i];
    at::native::resize_output(out[i], shape);
  }
  c10::DataPtr table;
  if (self.is_non_overlapping_and_dense() && are_dense(out) && are_of(out, self.scalar_type()))
    table = allocator(self.device().index()).allocate(sizeof(int64_t) * numbers_to_split(self, sizes, dim));
  launch("aten::split_with_sizes_copy.out", {self}, out.vec(), [sizes = sizes.vec(), dim](auto& from, auto& to) {
    at::split_with_sizes_copy_out(to, from[0], sizes, dim);
  });
}

std::vector<int64_t> chunk_cat_sizes(at::TensorList tensors, int64_t dim, int64_t chunks) {
  auto sizes = tensors[0].sizes().slice(0, dim).vec();
  int64_t bytes = 0;
  for (const auto& tensor : tensors) bytes += chunk_bytes(tensor, dim, chunks, tensor.element_size());
  sizes.insert(sizes.end(), {chunks, bytes / static_cast<int64_t>(tensors[0].element_size())});
  return sizes;
}

at::Tensor& chunk_cat_out(at::TensorList tensors, int64_t dim, int64_t chunks, at::Tensor& out) {
  dim = c10::maybe_wrap_dim(dim, tensors[0].dim());
  at::native::resize_output(out, chunk_cat_sizes(tensors, dim, chunks));
  c10::DataPtr table;
  auto dtype = tensors[0].scalar_type();
  bool is_cast = dtype == at::kBFloat16 && out.scalar_type() == at::kFloat;
  if (are_dense(tensors) && (is_cast || dtype == out.scalar_type()))
    table = allocator(out.device().index())
                .allocate(sizeof(int64_t) * numbers_to_concatenate(tensors, dim, chunks, out.element_size()));
  launch("aten::_chunk_cat.out", tensors.vec(), {out}, [dim, chunks](auto& from, auto& to) {
    at::Tensor result = to[0];
    at::_chunk_cat_out(result, from, dim, chunks);
  });
  return out;
}

at::Tensor chunk_cat(at::TensorList tensors, int64_t dim, int64_t chunks) {
  dim = c10::maybe_wrap_dim(dim, tensors[0].dim());
  at::Tensor out = at::empty(chunk_cat_sizes(tensors, dim, chunks), tensors[0].options());
  return chunk_cat_out(tensors, dim, chunks, out);
}

// One number for each chunk of each tensor, and as many for each tensor as the largest has chunks.
int64_t bytes_to_norm(at::TensorList tensors, at::ScalarType dtype) {
  int64_t chunks = 0;
  for (const auto& tensor : tensors) chunks = std::max(chunks, div_up(tensor.numel(), kNormChunk));
  return static_cast<int64_t>(tensors.size()) * chunks * c10::elementSize(at::toOpMathType(dtype));
}

std::vector<at::Tensor> foreach_norm(
    at::TensorList tensors, const at::Scalar& order, std::optional<at::ScalarType> dtype) {
  auto type = dtype.value_or(tensors[0].scalar_type());
  double p = order.toDouble();
  c10::DataPtr buffer;
  if (are_dense(tensors) && are_of(tensors, tensors[0].scalar_type()) && (p == 1 || p == 2 || std::isinf(p)))
    buffer = allocator(tensors[0].device().index()).allocate(bytes_to_norm(tensors, type));
  Tensors norms;
  for (size_t i = 0; i < tensors.size(); ++i) norms.push_back(at::empty({}, tensors[0].options().dtype(c10::toRealValueType(type))));
  launch("aten::_foreach_norm.Scalar", tensors.vec(), norms, [order, dtype](auto& from, auto& to) {
    auto results = at::_foreach_norm(from, order, dtype);
    for (size_t i = 0; i < to.size(); ++i) to[i].copy_(results[i]);
  });
  return norms;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("split_with_sizes_copy.out", split_with_sizes_copy_out);
  library.impl("_chunk_cat.out", chunk_cat_out);
  library.impl("_chunk_cat", chunk_cat);
  library.impl("_foreach_norm.Scalar", foreach_norm);
}

} // namespace

} // namespace sim
