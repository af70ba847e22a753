"""Pipeline parallelism: where a model is cut into stages, how stages run and exchange messages, what a step takes."""
