//! The repository itself: documents, requirements, layers, others' crates, units of systemd.

mod dependencies;
mod deploy;
mod docs;
mod face;
mod gate;
mod layers;
mod requirements;
