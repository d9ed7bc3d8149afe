def get_and_maybe_dequant_weights(layer, out_dtype):
    return layer.weight.to(out_dtype)
