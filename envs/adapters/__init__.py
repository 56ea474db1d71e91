"""An env of this project in the form that other libraries expect: `envs.vector.make_vector`, `envs.vector.make_sb3`."""
