layout = "SD"


def is_conv_state_dim_first():
    return layout == "DS"
