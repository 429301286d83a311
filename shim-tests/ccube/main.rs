//! C-Cube's trees on simulated machines: the bounds of its paper's figures that docs/simulation/ccube.md shows.

mod ccube;
