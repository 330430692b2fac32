package inboxsql

import (
	"embed"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
)

// SchemaAdapter names the database and the shape of its table. It is one of the types of this package, as it is;
// others, and types that embed one, are refused. For another database implement [inbox.Repository], and hold it to
// inboxtest.TestRepository.
type SchemaAdapter interface{ schemaAdapter() }

// DefaultPostgreSQLSchema is for PostgreSQL 12 and later, through lib/pq and through pgx's database/sql driver.
// Values are sent as literals, so that nothing is prepared and transaction-mode poolers work.
type DefaultPostgreSQLSchema struct{}

// PartitionedPostgreSQLSchema is for a table of PostgreSQL 14 and later that is partitioned by the time in its
// message ids. Old records go by dropping a partition, which costs the same for any number of them; see package
// partitions, which must run somewhere.
//
// Only ids of the given kind are taken, in their canonical spelling; any other is a permanent error that
// matches inbox.ErrInvalidKey, before SQL is sent. A message older than the oldest partition is a permanent
// error that matches inbox.ErrTooOld: it is not known whether it was processed. One that finds no partition
// otherwise is a transient error that matches partitions.ErrNoPartition.
type PartitionedPostgreSQLSchema struct {
	// IDs is the kind of the message ids. It must be the kind that the table's partitions have.
	// Required.
	IDs inbox.IDKind
}

// DefaultSQLiteSchema is for SQLite 3.35 and later, with modernc.org/sqlite or github.com/mattn/go-sqlite3.
//
// SQLite has one writer at a time: the claim, as the transaction's first statement, takes the write lock,
// and other messages wait for it within the connection's busy timeout. Set one in the DSN (with
// modernc.org/sqlite: _pragma=busy_timeout(5000)), and the WAL journal mode. Let it be shorter than Options.ClaimTimeout:
// github.com/mattn/go-sqlite3 waits for it whatever the context says.
type DefaultSQLiteSchema struct{}

func (DefaultPostgreSQLSchema) schemaAdapter()     {}
func (PartitionedPostgreSQLSchema) schemaAdapter() {}
func (DefaultSQLiteSchema) schemaAdapter()         {}

// Schema holds the schema files, as schema/<database>/NNN_*.sql, for users who run migrations with a tool
// of their own. They are numbered and additive: an instance works with the files of its version and with
// those of the next one.
var Schema embed.FS = dialect.Files
