"""N CPU PhysX scenes in one process behind ManiSkill's batched (GPU) code path.

ManiSkill has two code paths: one scene with per-object getters (CPU), or N scenes whose state lies in tensors of one
`PhysxGpuSystem` (GPU).  Here `physics.PhysicsBatch` stands in for the GPU system but owns one `PhysxCpuSystem` per
scene, so that controllers, evaluation, reward and observations run once for all N rows, while the physics of every row
is bit for bit that of a stock single env.

    build                     builds a batched task, and looks up whether its rows equal stock envs
    task.BatchedTask          a ManiSkill task class with N rows: a whole env, with partial resets and rows at rest
      scene.BatchedScene      its ManiSkillScene
                                  and what its bodies, robots and cameras have that those of stock envs lack
        physics.PhysicsBatch    steps, reads and writes N PhysX systems
          buffers                 tensors that remember which cells were assigned since they were last handed to PhysX,
                                  drive targets, and where a value lies in SAPIEN's packs
          contacts.ContactTable   contact impulses
        rendering.RenderGroup   one renderer per scene, images of chosen rows
      controllers               the robots' controllers, and whether anything but physics happens in a control step
    seeds                     separate seeds and random draws for each row
    scene_recreation          a new, history-free scene for each reset
    decimate, shaders         lighter visual meshes, and a first image without a seven-second table
    kinematics                inverse kinematics of N rows in C (clik.c), if certain to give SAPIEN's targets
    rotations                 ManiSkill's functions of poses and angles for few rows; they replace ManiSkill's only
                              while a batched env computes
"""
