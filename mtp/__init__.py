"""What the model is: Qwen3.5 and its multi-token-prediction head in Flax NNX. Imports neither `train` nor `infer`."""
