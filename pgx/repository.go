package inboxpgx

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	inbox "github.com/devmappa/watermill-inbox"
	"github.com/devmappa/watermill-inbox/internal/dialect"
	"github.com/devmappa/watermill-inbox/internal/engine"
)

// engineVersion is the engine that this module was made for. It is written here, not taken from there: the engine
// may come from another release.
const engineVersion = 1

// Options of the repository.
type Options struct {
	// Table is the table's name, with or without its schema: letters, digits, underscores and one dot, at most 37
	// bytes without the schema, because PostgreSQL cuts the longer name of its index.
	// Default: "watermill_inbox".
	Table string

	// IDs says that the table is partitioned by message ids of this kind, see inboxsql.PartitionedPostgreSQLSchema:
	// other ids are refused, and messages older than its partitions. Package partitions, which makes and retires
	// them, works on stdlib.OpenDBFromPool(pool) of github.com/jackc/pgx/v5/stdlib.
	// Default: a plain table.
	IDs inbox.IDKind

	// TxOptions are used to open each transaction. AccessMode pgx.ReadOnly is refused. Under
	// pgx.RepeatableRead and pgx.Serializable a copy that waited for the first gets an error and is a
	// duplicate on its retry.
	// Default: the isolation level of the server.
	TxOptions pgx.TxOptions
}

// Repository is an [inbox.Repository] with [inbox.Records], on a pgxpool. All its methods may be called by many goroutines.
type Repository struct {
	contract
	engine *engine.Engine
}

// contract has the methods of [inbox.Repository] and [inbox.Records].
type contract = engine.Contract

// NewRepository returns a repository on the pool. It opens no connection, so that a service may start
// before its database. The pool stays the caller's, who closes it.
func NewRepository(connections *pgxpool.Pool, options Options) (*Repository, error) {
	if connections == nil {
		return nil, errors.New("inboxpgx: pool is nil")
	}
	if options.TxOptions.AccessMode == pgx.ReadOnly {
		return nil, errors.New("inboxpgx: TxOptions.AccessMode is read only, but a claim is a write")
	}
	var d dialect.Dialect = dialect.PostgreSQL{}
	if options.IDs != 0 {
		d = dialect.Partitioned{IDs: options.IDs}
	}
	e, err := engine.New(engine.Config{
		Version: engineVersion, Package: "inboxpgx", Pool: pool{connections, options.TxOptions}, Dialect: d, Table: options.Table,
	})
	if err != nil {
		return nil, err
	}
	return &Repository{e, e}, nil
}

// Check verifies that the inbox can be trusted, as inboxsql.Repository.Check does. It returns an
// [*inbox.CheckError] that names all faults, or the error of the query.
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
// roll it back, and closes its rows and batch results before it returns. It returns false outside of a
// handler and once the transaction has ended.
func TxFromContext(ctx context.Context) (pgx.Tx, bool) {
	t, ok := inbox.TransactionFromContext[*engine.Transaction](ctx)
	if !ok {
		return nil, false
	}
	tx, ok := t.Tx().(*transaction)
	if !ok {
		return nil, false
	}
	return tx.handlerTx, true
}

// ContextWithTx returns a context in which [TxFromContext] finds the transaction, to unit-test a handler
// without a router: begin a transaction, call the handler, look at what it wrote, roll back.
func ContextWithTx(ctx context.Context, tx pgx.Tx) context.Context {
	return inbox.ContextWithTransaction(ctx, engine.NewTransaction(&transaction{handlerTx: tx}))
}
