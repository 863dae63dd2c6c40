//! What owners of buffers cannot do, as programs that the compiler refuses.
//!
//! A buffer has one owner.
//!
//! ```compile_fail,E0277
//! fn clonable<T: Clone>() {}
//!
//! clonable::<rpcrdma_mempool::Buf>();
//! ```
//!
//! The bytes of a frozen buffer are constant.
//!
//! ```compile_fail,E0594
//! fn change(mut frozen: rpcrdma_mempool::Frozen) {
//!     frozen[0] = 1;
//! }
//! ```
//!
//! A buffer whose bytes are borrowed cannot be lent to the device.
//!
//! ```compile_fail,E0505
//! fn keep_a_slice(buf: rpcrdma_mempool::Buf) {
//!     let bytes = &buf[..];
//!     let _lent = buf.lend();
//!     println!("{}", bytes.len());
//! }
//! ```
//!
//! The bytes of a lent buffer cannot be read.
//!
//! ```compile_fail,E0308
//! fn read_while_lent(lent: rpcrdma_mempool::Lent) -> u8 {
//!     let bytes: &[u8] = &lent;
//!     bytes[0]
//! }
//! ```
//!
//! A lent buffer is not `Sync`.
//!
//! ```compile_fail,E0277
//! fn shareable<T: Sync>() {}
//!
//! shareable::<rpcrdma_mempool::Lent>();
//! ```
//!
//! A lent buffer is not `Send`.
//!
//! ```compile_fail,E0277
//! fn elsewhere(lent: rpcrdma_mempool::Lent) {
//!     std::thread::spawn(move || drop(lent));
//! }
//! ```
//!
//! A mapping is not `Sync`.
//!
//! ```compile_fail,E0277
//! fn shareable<T: Sync>() {}
//!
//! shareable::<rpcrdma_mempool::PeerMapping>();
//! ```
//!
//! A pool is not `Sync`.
//!
//! ```compile_fail,E0277
//! fn elsewhere(pool: &'static rpcrdma_mempool::Pool) {
//!     std::thread::spawn(move || pool.alloc(1));
//! }
//! ```
//!
//! A pool is not `Send`.
//!
//! ```compile_fail,E0277
//! fn elsewhere(pool: rpcrdma_mempool::Pool) {
//!     std::thread::spawn(move || drop(pool));
//! }
//! ```
//!
//! The bytes of a posted buffer cannot be read.
//!
//! ```compile_fail,E0608
//! fn read_what_the_nic_may_write(posted: rpcrdma_mempool::Posted) -> u8 {
//!     posted[0]
//! }
//! ```
//!
//! Whoever completes a posted buffer has to promise that the device has finished with it.
//!
//! ```compile_fail,E0133
//! fn believe(posted: rpcrdma_mempool::Posted) -> rpcrdma_mempool::Buf {
//!     posted.complete()
//! }
//! ```
//!
//! A posted buffer is moved to the device.
//!
//! ```compile_fail,E0382
//! fn use_after_post(mut buf: rpcrdma_mempool::Buf) {
//!     let _posted = buf.post();
//!     buf[0] = 1;
//! }
//! ```
//!
//! A posted buffer has one owner.
//!
//! ```compile_fail,E0277
//! fn clonable<T: Clone>() {}
//!
//! clonable::<rpcrdma_mempool::Posted>();
//! ```
