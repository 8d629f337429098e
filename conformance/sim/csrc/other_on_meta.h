// Operators about which torch's kernels for meta tensors tell other facts than the CPU's.
#pragma once

#include <set>
#include <string>

namespace sim {

// Operators whose results have other shapes, strides or dtypes on the CPU than on meta tensors.
inline bool is_other_on_meta(const std::string& operator_name) {
  static const std::set<std::string> names{
      "_batch_norm_no_update",
      "_batch_norm_with_update",
      "_embedding_bag",
      "_embedding_bag_forward_only",
      "_fft_c2c",
      "_fft_c2r",
      "_fft_r2c",
      "_linalg_eigh",
      "_linalg_solve_ex",
      "_linalg_svd",
      "_native_batch_norm_legit",
      "cholesky_inverse",
      "col2im",
      "geqrf",
      "im2col",
      "linalg_cholesky_ex",
      "linalg_eig",
      "linalg_householder_product",
      "linalg_ldl_factor_ex",
      "linalg_ldl_solve",
      "linalg_lstsq",
      "linalg_lu_factor_ex",
      "linalg_lu_solve",
      "linalg_qr",
      "linalg_solve_triangular",
      "logit_backward",
      "lu_unpack",
      "max_unpool2d",
      "native_batch_norm",
      "native_group_norm",
      "native_layer_norm",
      "nonzero_static",
      "ormqr",
      "sort",
      "triangular_solve",
      "vdot"};
  return names.count(operator_name.substr(operator_name.find("::") + 2)) > 0;
}

} // namespace sim
