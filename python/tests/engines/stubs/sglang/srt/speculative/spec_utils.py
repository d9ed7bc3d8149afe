def resolve_draft_decode_window(model_runner):
    """So many committed tokens that drafts see, the last and the first of them; zeros: all."""
    return getattr(model_runner, "draft_window", (0, 0))
