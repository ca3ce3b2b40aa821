"""The operators of torch.ops.aten that have a kernel on an NPU: name, or name.overload.

From torch_npu/csrc/aten/npu_native_functions.yaml and npu_native_functions_by_codegen.yaml of torch-npu 2.10.0.post4, sections
"supported", "symint" and "autograd". torch-npu computes every other operator on the CPU, with copies there and back and a wait
for the device each time, unless torch composes it of operators that are here (rl/plan/operators.py). Left out: operators that
torch 2.13 composes, whether torch-npu has a kernel for them or not.
"""

KIND = "npu"  # the devices that have them
NAMES = """
__ilshift__.Scalar __ilshift__.Tensor __irshift__.Scalar __irshift__.Tensor __lshift__.Scalar __lshift__.Tensor
__rshift__.Scalar __rshift__.Tensor _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d
_adaptive_avg_pool3d_backward _add_relu.Tensor _add_relu.out _add_relu_.Tensor _addmm_activation.out _aminmax _aminmax.dim
_amp_foreach_non_finite_check_and_unscale_ _amp_update_scale_ _cdist_backward _cdist_forward _coalesce _conv_depthwise2d
_conv_depthwise2d.out _copy_from_and_resize _ctc_loss _ctc_loss_backward _cummax_helper _cummin_helper _embedding_bag
_embedding_bag_forward_only _embedding_bag_per_sample_weights_backward _fft_c2c _fft_c2c.out _fft_c2r _fft_c2r.out _fft_r2c
_fft_r2c.out _fused_adamw_ _fused_sdp_choice _index_put_impl_ _linalg_svd.U _linalg_svd _local_scalar_dense _log_softmax
_log_softmax.out _log_softmax_backward_data _log_softmax_backward_data.out _masked_scale _masked_softmax
_native_batch_norm_legit _native_multi_head_attention _pdist_forward _prelu_kernel _prelu_kernel_backward _reshape_alias
_scaled_grouped_mm _scaled_grouped_mm_v2 _scaled_mm _scaled_mm_v2 _slow_conv2d_backward.output_mask _slow_conv2d_forward
_slow_conv2d_forward.output _softmax _softmax.out _softmax_backward_data _softmax_backward_data.out _thnn_fused_gru_cell
_thnn_fused_lstm_cell _thnn_fused_lstm_cell_backward_impl _to_sparse _to_sparse.sparse_dim _transform_bias_rescale_qkv _unique
_unique2 _upsample_bicubic2d_aa _upsample_bicubic2d_aa.out _upsample_bicubic2d_aa_backward
_upsample_bicubic2d_aa_backward.grad_input _upsample_bilinear2d_aa _upsample_bilinear2d_aa.out _upsample_bilinear2d_aa_backward
_upsample_bilinear2d_aa_backward.grad_input _upsample_nearest_exact1d _upsample_nearest_exact1d.out
_upsample_nearest_exact1d_backward _upsample_nearest_exact1d_backward.grad_input _upsample_nearest_exact2d
_upsample_nearest_exact2d.out _upsample_nearest_exact2d_backward _upsample_nearest_exact2d_backward.grad_input
_upsample_nearest_exact3d _upsample_nearest_exact3d.out _upsample_nearest_exact3d_backward
_upsample_nearest_exact3d_backward.grad_input abs.out acos acos.out acos_ acosh acosh.out acosh_ adaptive_avg_pool2d.out
adaptive_avg_pool3d.out adaptive_avg_pool3d_backward.grad_input adaptive_max_pool2d adaptive_max_pool2d.out
adaptive_max_pool2d_backward adaptive_max_pool2d_backward.grad_input adaptive_max_pool3d adaptive_max_pool3d.out
adaptive_max_pool3d_backward adaptive_max_pool3d_backward.grad_input add.Tensor add.out add_.Tensor addbmm addbmm.out addbmm_
addcdiv addcdiv.out addcdiv_ addcmul addcmul.out addcmul_ addmm addmm.dtype addmm.dtype_out addmm.out addmm_ addmv addmv.out
addmv_ all.all_out all all.dim all.out amax amax.out amin amin.out aminmax aminmax.out angle angle.out any.all_out any any.dim
any.out arange.start_out argmax.out argmin argmin.out as_strided asin asin.out asin_ asinh asinh.out asinh_ atan atan.out atan2
atan2.out atan2_ atan_ atanh atanh.out atanh_ avg_pool2d avg_pool2d.out avg_pool2d_backward avg_pool2d_backward.grad_input
avg_pool3d avg_pool3d.out avg_pool3d_backward avg_pool3d_backward.grad_input baddbmm baddbmm.out baddbmm_
batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_elemt.out batch_norm_gather_stats_with_counts
batch_norm_stats bernoulli.out bernoulli_.Tensor bernoulli_.float binary_cross_entropy binary_cross_entropy.out
binary_cross_entropy_backward binary_cross_entropy_backward.grad_input bincount bitwise_and.Tensor bitwise_and.Tensor_out
bitwise_and_.Tensor bitwise_not bitwise_not.out bitwise_not_ bitwise_or.Tensor bitwise_or.Tensor_out bitwise_xor.Tensor
bitwise_xor.Tensor_out bitwise_xor_.Tensor bmm bmm.dtype bmm.dtype_out bmm.out bucketize.Scalar bucketize.Tensor
bucketize.Tensor_out cat cat.out ceil ceil.out ceil_ channel_shuffle clamp.Tensor clamp.Tensor_out clamp clamp.out clamp_.Tensor
clamp_ clamp_max.Tensor clamp_max.Tensor_out clamp_max clamp_max.out clamp_max_.Tensor clamp_max_ clamp_min.Tensor
clamp_min.Tensor_out clamp_min clamp_min.out clamp_min_.Tensor clamp_min_ col2im col2im.out complex.out cos cos.out cos_ cosh
cosh.out cosh_ count_nonzero.dim_IntList cumprod.out cumsum cumsum.out div.Tensor div.Tensor_mode div.out div.out_mode
div_.Tensor div_.Tensor_mode dot elu elu.out elu_ elu_backward elu_backward.grad_input embedding_dense_backward
embedding_renorm_ empty.memory_format empty_strided eq.Scalar eq.Scalar_out eq.Tensor eq.Tensor_out eq_.Scalar eq_.Tensor equal
erf erf.out erf_ erfc erfc.out erfc_ erfinv erfinv.out erfinv_ exp exp.out exp2 exp2.out exp2_ exp_ expm1 expm1.out expm1_
exponential_ eye.m_out eye.out fill_.Scalar fill_.Tensor flip floor floor.out floor_ floor_divide floor_divide.out
floor_divide_.Tensor fmod.Tensor fmod.Tensor_out fmod_.Tensor frac frac.out frac_ gather gather.out gcd.out ge.Scalar
ge.Scalar_out ge.Tensor ge.Tensor_out ge_.Scalar ge_.Tensor gelu.out gelu_backward glu glu.out glu_backward
glu_backward.grad_input grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward gt.Scalar
gt.Scalar_out gt.Tensor gt.Tensor_out gt_.Scalar gt_.Tensor hardshrink hardshrink.out hardshrink_backward
hardshrink_backward.grad_input hardsigmoid hardsigmoid.out hardsigmoid_ hardsigmoid_backward hardswish hardswish.out hardswish_
hardswish_backward hardtanh hardtanh.out hardtanh_ hardtanh_backward hardtanh_backward.grad_input histc histc.out im2col
im2col.out index.Tensor index_add index_add.out index_copy index_copy.out index_copy_ index_fill_.int_Scalar
index_fill_.int_Tensor index_select index_select.out is_set_to isin.Scalar_Tensor_out isin.Tensor_Scalar isin.Tensor_Scalar_out
isin.Tensor_Tensor isin.Tensor_Tensor_out isnan isneginf.out isposinf.out kthvalue.values le.Scalar le.Scalar_out le.Tensor
le.Tensor_out le_.Scalar le_.Tensor leaky_relu leaky_relu.out leaky_relu_ leaky_relu_backward leaky_relu_backward.grad_input
lerp.Scalar lerp.Scalar_out lerp.Tensor lerp.Tensor_out lerp_.Scalar lerp_.Tensor linalg_cross linalg_cross.out linalg_qr
linalg_qr.out linalg_solve_triangular linalg_solve_triangular.out linalg_vector_norm linalg_vector_norm.out linspace.out log
log.out log10 log10.out log10_ log1p log1p.out log1p_ log2 log2.out log2_ log_ log_sigmoid_backward
log_sigmoid_backward.grad_input log_sigmoid_forward log_sigmoid_forward.output logaddexp logaddexp.out logaddexp2 logaddexp2.out
logical_and.out logical_not.out logical_or.out logical_xor.out logit logit.out logit_ logit_backward logit_backward.grad_input
logspace.out lt.Scalar lt.Scalar_out lt.Tensor lt.Tensor_out lt_.Scalar lt_.Tensor masked_fill_.Scalar masked_fill_.Tensor
masked_scatter_ masked_select masked_select.out matmul_backward max max.dim max.dim_max max_pool2d_with_indices
max_pool2d_with_indices.out max_pool2d_with_indices_backward max_pool2d_with_indices_backward.grad_input max_pool3d_with_indices
max_pool3d_with_indices.out max_pool3d_with_indices_backward max_pool3d_with_indices_backward.grad_input max_unpool2d
max_unpool2d.out max_unpool3d max_unpool3d.out maximum maximum.out mean.dim mean.out median median.dim_values min min.dim
min.dim_min minimum minimum.out mish mish.out mish_ mm mm.dtype mm.dtype_out mm.out mse_loss mse_loss.out mse_loss_backward
mse_loss_backward.grad_input mul.Tensor mul.out mul_.Tensor multilabel_margin_loss_forward multilabel_margin_loss_forward.output
multinomial multinomial.out nan_to_num.out nanmedian nansum nansum.out native_batch_norm native_batch_norm.out
native_batch_norm_backward native_dropout native_dropout_backward native_group_norm_backward native_layer_norm_backward
ne.Scalar ne.Scalar_out ne.Tensor ne.Tensor_out ne_.Scalar ne_.Tensor neg neg.out neg_ nll_loss2d_backward
nll_loss2d_backward.grad_input nll_loss2d_forward nll_loss2d_forward.output nll_loss_backward nll_loss_backward.grad_input
nll_loss_forward nll_loss_forward.output nonzero nonzero.out norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.dtype_out norm.out
normal.Tensor_Tensor normal.Tensor_Tensor_out normal.Tensor_float normal.Tensor_float_out normal.float_Tensor
normal.float_Tensor_out normal_ polar.out pow.Scalar pow.Scalar_out pow.Tensor_Scalar pow.Tensor_Scalar_out pow.Tensor_Tensor
pow.Tensor_Tensor_out pow_.Scalar pow_.Tensor prod prod.dim_int prod.int_out put_ quantize_per_channel quantize_per_tensor
random_ random_.from random_.to randperm.generator_out range.out reciprocal reciprocal.out reciprocal_ record_stream
reflection_pad1d reflection_pad1d.out reflection_pad1d_backward reflection_pad1d_backward.grad_input reflection_pad2d
reflection_pad2d.out reflection_pad2d_backward reflection_pad2d_backward.grad_input reflection_pad3d reflection_pad3d.out
reflection_pad3d_backward reflection_pad3d_backward.grad_input relu relu_ remainder.Scalar_Tensor remainder.Tensor
remainder.Tensor_out remainder_.Tensor renorm renorm.out renorm_ repeat_interleave.self_Tensor replication_pad1d
replication_pad1d.out replication_pad1d_backward replication_pad1d_backward.grad_input replication_pad2d replication_pad2d.out
replication_pad2d_backward replication_pad2d_backward.grad_input replication_pad3d replication_pad3d.out
replication_pad3d_backward replication_pad3d_backward.grad_input resize_ roll round.decimals round.decimals_out round round.out
round_.decimals round_ rrelu_with_noise rrelu_with_noise.out rrelu_with_noise_ rsqrt rsqrt.out rsqrt_ rsub.Tensor
scatter.src_out scatter.value_out scatter_.src scatter_.value scatter_add scatter_add_ searchsorted.Scalar searchsorted.Tensor
searchsorted.Tensor_out set_ set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor sgn sgn.out sigmoid
sigmoid.out sigmoid_ sigmoid_backward sigmoid_backward.grad_input sign sign.out sign_ signbit.out silu silu.out silu_
silu_backward.grad_input sin sin.out sin_ sinc sinc.out sinc_ sinh sinh.out sinh_ slow_conv3d_forward slow_conv3d_forward.output
slow_conv_dilated2d slow_conv_transpose2d slow_conv_transpose2d.out smooth_l1_loss smooth_l1_loss.out
smooth_l1_loss_backward.grad_input softplus softplus.out softplus_backward.grad_input softshrink softshrink.out
softshrink_backward softshrink_backward.grad_input sort.stable sort.values_stable sqrt sqrt.out sqrt_ std.correction
std.correction_out std_mean.correction sub.Tensor sub.out sub_.Tensor sum.IntList_out sum.dim_IntList take take.out tan tan.out
tan_ tanh tanh.out tanh_ tanh_backward tanh_backward.grad_input threshold threshold.out threshold_ threshold_backward topk
topk.values trace triangular_solve.X tril tril.out tril_ tril_indices triu triu.out triu_ triu_indices trunc trunc.out trunc_
unfold unfold_backward uniform_ unique_consecutive unique_dim upsample_bicubic2d upsample_bicubic2d.out
upsample_bicubic2d_backward upsample_bicubic2d_backward.grad_input upsample_bilinear2d upsample_bilinear2d.out
upsample_bilinear2d_backward upsample_bilinear2d_backward.grad_input upsample_linear1d upsample_linear1d.out
upsample_linear1d_backward upsample_nearest1d upsample_nearest1d.out upsample_nearest1d_backward
upsample_nearest1d_backward.grad_input upsample_nearest2d upsample_nearest2d.out upsample_nearest2d_backward
upsample_nearest2d_backward.grad_input upsample_nearest3d upsample_nearest3d.out upsample_nearest3d_backward
upsample_nearest3d_backward.grad_input upsample_trilinear3d upsample_trilinear3d.out upsample_trilinear3d_backward
upsample_trilinear3d_backward.grad_input var.correction var.correction_out var_mean.correction vdot view view_as_complex
view_as_real where.self where.self_out xlogy.OutTensor xlogy.Tensor xlogy_.Tensor zero_
"""
