"""OpenVLA and OpenVLA-OFT on the timm and transformers of this project, in the published folder layout.

images --images--> pixel_values [B, K * 6, S, S] --vision--> patches [B, K * P, D] --.
instruction --prompt--> token ids [B, L] --------------------embed--------------------+--> Llama --> hidden states
proprioception --heads--> one token [B, 1, D]  (OFT only) ----------------------------'

OpenVLA   decoding.py         causal attention, one token per action dimension, one after the other with a cache
OFT       oft.py              every position sees every other, all tokens of C actions at once; tokens, or an L1 head

K images, P patches per image, S pixels per side, L prompt tokens, D width of the language model, C actions per
chunk, A dimensions of an action, V tokens of the vocabulary.  The modules know nothing of rollouts and updates.
"""
