// Package inboxpgx keeps the inbox in PostgreSQL, through a pgx pool.
//
//	repository, err := inboxpgx.NewRepository(pool, inboxpgx.Options{})
//
// The table is inboxsql's, so that services with either package can share a database; its schema files are in
// inboxsql.Schema.
// For a table that is partitioned by time-ordered ids set Options.IDs. It is a module of its own, because pgx
// needs a newer Go than lib/pq.
//
// # Round trips
//
// BEGIN and the claim are one round trip. So a first message costs none more than the transaction that its
// handler needs anyway: three with one statement. A duplicate takes three, its record read back included.
// The inbox's own statements are text with quoted literals, whatever the pool's QueryExecMode is: nothing is
// prepared, and nothing is set in the session, so that transaction-mode poolers work. What the handler sends
// is sent in the pool's mode.
//
// # The handler's transaction
//
// [TxFromContext] returns pgx's own transaction, behind a guard: CopyFrom, SendBatch, nested Begin,
// LargeObjects and the code that sqlc generates for pgx work. Its methods may be called by any goroutine,
// one at a time, until the handler returns; then they return pgx.ErrTxClosed. Rows and batch results must be
// closed by then, or the commit is refused. What Conn returns is not guarded.
//
// A handler that ends the transaction, also by a statement's text, gets inbox.ErrTransactionBroken.
//
// # Ended contexts
//
// Pgx does not end a transaction with its context. Here it ends: the running statement is cancelled and the
// connection closed, since a pgx connection cannot be rolled back while its handler may be using it. An
// ended context therefore costs the pool a connection.
//
// A claim waits for a connection and for another copy of the message, at most for the middleware's
// ClaimTimeout. Rollback gives up on a dead network after five seconds. A commit has no context: set TCP_USER_TIMEOUT in
// ConnConfig.DialFunc, see RELIABILITY.md. Set
// idle_in_transaction_session_timeout and tcp_keepalives_idle by ALTER ROLE, because a client that has
// vanished holds its claim until the server notices.
package inboxpgx
