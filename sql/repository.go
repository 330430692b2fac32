package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
	"github.com/devmappa/watermill-inbox/internal/sqlpool"
)

// Options of the repository.
type Options struct {
	// SchemaAdapter is DefaultPostgreSQLSchema, PartitionedPostgreSQLSchema or DefaultSQLiteSchema.
	// Required.
	SchemaAdapter SchemaAdapter

	// Table is the table's name, with or without its schema: letters, digits, underscores and one dot, at most 37
	// bytes without the schema, because PostgreSQL cuts the longer name of its index.
	// Default: "watermill_inbox".
	Table string

	// TxOptions are used to open each transaction. ReadOnly is refused. Under REPEATABLE READ and
	// SERIALIZABLE a copy that waited for the first gets an error and is a duplicate on its retry.
	// Default: nil, the isolation level of the server.
	TxOptions *sql.TxOptions
}

// Repository is an [inbox.Repository] with [inbox.Records], on database/sql. All its methods may be called by many goroutines.
type Repository struct {
	contract
	engine *engine.Engine
}

// contract has the methods of [inbox.Repository] and [inbox.Records].
type contract = engine.Contract

// NewRepository returns a repository on the pool. It opens no connection, so that a service may start
// before its database. The pool stays the caller's, who closes it.
func NewRepository(db *sql.DB, options Options) (*Repository, error) {
	if db == nil {
		return nil, errors.New("inboxsql: db is nil")
	}
	if options.TxOptions != nil && options.TxOptions.ReadOnly {
		return nil, errors.New("inboxsql: TxOptions.ReadOnly is set, but a claim is a write")
	}
	d, err := dialectOf(options.SchemaAdapter)
	if err != nil {
		return nil, err
	}
	e, err := engine.New(engine.Config{
		Version: engine.Version, Package: "inboxsql", Pool: sqlpool.New(db, options.TxOptions), Dialect: d, Table: options.Table,
	})
	if err != nil {
		return nil, err
	}
	return &Repository{e, e}, nil
}

// Check verifies that the inbox can be trusted: the server is writable; both ends speak UTF-8; the table
// is there with all its columns, and survives a crash; the names are compared byte by byte; there is a
// unique key on exactly the key's columns, and nothing more. It returns a [*inbox.CheckError] that names all
// faults, or the error of the query.
//
// It runs by itself before the first claim until it has succeeded once. It is a query on the catalog, cheap
// enough for a readiness probe. A table named without a schema is looked up in the search path once; what
// was found then is used for ever.
func (r *Repository) Check(ctx context.Context) error { return r.engine.Check(ctx) }

// InitializeSchema creates the tables with their index, and then checks them, see [Repository.Check]. Many instances may
// call it at once. When nothing that Check asks for is missing it only reads, so that a role without the right to create
// may call it. It makes no table when there is one in the search path, and no index on one that Check takes as it is: that
// would lock the table, and only the Cleaner needs it, who says that it is missing.
func (r *Repository) InitializeSchema(ctx context.Context) error {
	return r.engine.InitializeSchema(ctx)
}

// TxFromContext returns the transaction in which the message is claimed. All that the handler writes
// through it is committed together with the claim, or not at all. The handler must neither commit nor
// roll it back. It returns false outside of a handler and once the transaction has ended.
//
// Watermill-sql has a function of the same name that returns its subscriber's transaction; writing
// through that one leaves the guarantee.
func TxFromContext(ctx context.Context) (*sql.Tx, bool) {
	t, ok := inbox.TransactionFromContext[*engine.Transaction](ctx)
	if !ok {
		return nil, false
	}
	tx, ok := t.Tx().(*sqlpool.Tx)
	if !ok {
		return nil, false
	}
	return tx.Tx, true
}

// ContextWithTx returns a context in which [TxFromContext] finds the transaction, to unit-test a handler
// without a router: begin a transaction, call the handler, look at what it wrote, roll back.
func ContextWithTx(ctx context.Context, tx *sql.Tx) context.Context {
	return inbox.ContextWithTransaction(ctx, engine.NewTransaction(&sqlpool.Tx{Tx: tx}))
}

// dialectOf takes exactly the types of this package. One that embeds them would be obeyed in some places and not
// in others, and a claim of another shape is another guarantee.
func dialectOf(adapter SchemaAdapter) (dialect.Dialect, error) {
	switch schema := adapter.(type) {
	case DefaultPostgreSQLSchema:
		return dialect.PostgreSQL{}, nil
	case PartitionedPostgreSQLSchema:
		return dialect.Partitioned{IDs: schema.IDs}, nil
	case DefaultSQLiteSchema:
		return dialect.SQLite{}, nil
	case nil:
		return nil, errors.New("inboxsql: SchemaAdapter is nil")
	}
	return nil, fmt.Errorf("inboxsql: SchemaAdapter is a %T; only the types of this package are taken, as they are: for another database implement inbox.Repository", adapter)
}
