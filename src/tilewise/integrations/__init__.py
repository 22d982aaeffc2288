"""Ways into tilewise for programs that already exist. None is imported by `import tilewise`, and nothing imports them.

sdpa          F.scaled_dot_product_attention everywhere in the program goes through the planner
flash_attn    the functions of the flash-attn package: its names, shapes and semantics
transformers  attn_implementation="tilewise" for Hugging Face models
thunder       an executor for lightning-thunder
"""
