// Package inboxsql keeps the inbox in a SQL database, through database/sql.
//
//	repository, err := inboxsql.NewRepository(db, inboxsql.Options{
//		SchemaAdapter: inboxsql.DefaultPostgreSQLSchema{},
//	})
//
// PostgreSQL is served through lib/pq and through pgx's database/sql driver, SQLite through modernc.org/sqlite and
// github.com/mattn/go-sqlite3, whose error codes are known. It links no driver.
//
// With lib/pq close a CopyIn on every way out of the handler. When a transaction ends with an open one, two goroutines
// read from the connection, which lib/pq may not survive. On a pool of inboxpq.NewConnector it is closed, and the message
// poisoned.
//
// Goroutines of a handler may share its transaction. Each of their errors must reach what the handler returns: what is
// dropped is missing in the effect, and the claim is committed all the same.
//
// # Round trips
//
// Through lib/pq a first message costs one round trip more than the transaction that the handler needs
// anyway, the claim; a duplicate takes four, its record read back included. On a pool made with
// inboxpq.NewConnector (package sql/pq) the claim travels with BEGIN: no round trip more, and three for a duplicate. Through other PostgreSQL drivers
// there is one more before the commit, which proves that the transaction is still open: pgx's bridge does
// not notice when the handler has ended it by SQL text. It also needs the handler to close its rows:
// with unread ones the commit is refused.
//
// # Waiting, and dead networks
//
// A claim waits for a connection and for another copy of the message, at most for the middleware's
// ClaimTimeout. A server that says nothing any more is another matter: through lib/pq itself every statement then waits
// for as long as the operating system does, whatever its context, and through every driver the commit does. The
// example of inboxpq.NewConnector bounds both; RELIABILITY.md has the times that were measured. Set
// idle_in_transaction_session_timeout and tcp_keepalives_idle by ALTER ROLE, because a client that has
// vanished holds its claim until the server notices.
//
// # Schema
//
// [Repository.InitializeSchema] creates the table. Or take the files of [Schema] into a migration tool.
// The GRANTs that a role needs are in the schema file.
//
// # Partitions
//
// Where all message ids are UUIDv7s, or all are ULIDs, a table of PostgreSQL can be partitioned by them, see
// [PartitionedPostgreSQLSchema]: the key is the same and stays unique, and old records go with their partition
// instead of by DELETE. Package partitions makes and retires the partitions, and turns a plain table into such a
// one.
package inboxsql
