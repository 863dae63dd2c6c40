//! Forwarding of trait methods: by wrappers of fabrics, and to the sockets of a fabric.

#![forbid(unsafe_code)]

/// Implements the listed methods of [`Fabric`](crate::Fabric) by calls of the inner fabric, which
/// `$each!(self, fabric => …)` selects.
macro_rules! forward {
    ($each:ident($this:ident): $(
        $(#[$attribute:meta])*
        fn $name:ident(&$($receiver:ident)+ $(, $argument:ident: $type:ty)*) $(-> $result:ty)?;
    )*) => {
        $(
            $(#[$attribute])*
            fn $name(&$($receiver)+ $(, $argument: $type)*) $(-> $result)? {
                $each!($this, fabric => fabric.$name($($argument),*))
            }
        )*
    };
}

/// Implements the methods that the fabrics over sockets share. Each of these fabrics has the fields `capabilities`,
/// `common`, `table` and `connections`.
macro_rules! over_sockets {
    () => {
        fn capabilities(&self) -> &Capabilities {
            &self.capabilities
        }

        fn bind(address: &FabricAddress) -> Result<Self::Listener, FabricError> {
            Self::Listener::bind(address)
        }

        fn listen(&mut self, listener: &Self::Listener) -> Result<(), FabricError> {
            self.connections.sockets.listen(listener)
        }

        fn unlisten(&mut self) {
            self.connections.sockets.unlisten();
        }

        fn connect(&mut self, address: &FabricAddress, params: &ConnectParams) -> Result<QpId, FabricError> {
            self.start_connect(address, params)
        }

        fn accept(&mut self, request: RequestId, params: &ConnectParams) -> Result<QpId, FabricError> {
            self.accept_request(request, params)
        }

        fn reject(&mut self, request: RequestId, private_data: &[u8]) {
            self.connections.reject(&self.common, request, private_data);
        }

        fn flow(&mut self, qp: QpId) -> Option<Flow> {
            self.table.get_mut(qp).map(|qp| qp.flow())
        }

        #[inline]
        fn remote_address(&self, mem: &Lent, offset: usize) -> u64 {
            (mem.offset() + offset) as u64
        }

        fn waker(&self) -> Waker {
            self.connections.sockets.epoll_set.waker()
        }

        fn descriptor(&self) -> BorrowedFd<'_> {
            self.connections.sockets.epoll_set.descriptor()
        }

        fn longest_wait(&self) -> Option<Duration> {
            $crate::epoll_set::shorter(self.busy_limit(), self.connections.longest_wait())
        }
    };
}

pub(crate) use {forward, over_sockets};
