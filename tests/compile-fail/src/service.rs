//! What handlers cannot do with a call, as programs that the compiler refuses.
//!
//! A handler cannot answer one call with another kept call.
//!
//! ```compile_fail,E0277
//! let held = std::sync::Mutex::new(None::<rpcrdma::service::DeferredCall>);
//! rpcrdma::Procedure::new(move |call| {
//!     if let Some(other) = held.lock().unwrap().as_mut() {
//!         std::mem::swap(call, &mut **other);
//!     }
//!     Ok(())
//! });
//! ```
//!
//! Only the engine makes a server call.
//!
//! ```compile_fail,E0599
//! let _ = rpcrdma::ServerCall::default();
//! ```
//!
//! A handler cannot replace its call with another value.
//!
//! ```compile_fail,E0277
//! rpcrdma::Procedure::new(|call| {
//!     let _ = std::mem::take(call);
//!     Ok(())
//! });
//! ```
