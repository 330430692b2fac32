// Package outbox publishes inside a handler's transaction: what a handler publishes is in an outbox table if, and
// only if, the handler's work and the claim of its message are committed.
//
// The table, and what takes messages from it to a broker, are watermill-sql's: a subscriber of it, or Watermill's
// forwarder. Package outbox works with inboxsql and with inboxpgx.
//
// On PostgreSQL no row is taken while an older transaction that has written anything is open, so that none is skipped:
// while a handler takes six seconds, the events of quick ones wait as long. DefaultPostgreSQLSchema deletes no row that
// was taken; delete those below the offsets that all its consumers have acknowledged.
package outbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"slices"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"

	inbox "github.com/devmappa/watermill-inbox"
)

// Errors of [Publisher.Publish], before any SQL is sent.
var (
	// ErrNoTransaction: a message's context has no open transaction of the inbox: it was not set, or the
	// handler has returned. The publisher never falls back to a pool. Permanent, because no retry sets a context.
	ErrNoTransaction = errors.New("outbox: no open transaction of the inbox in the message's context")

	// ErrMixedTransactions: the messages of one call have different transactions. Permanent.
	ErrMixedTransactions = errors.New("outbox: the messages have different transactions")
)

// maxBatch keeps a statement below PostgreSQL's limit of 65535 parameters, of which watermill-sql takes three for
// a message.
const maxBatch = 1000

// Options of a [Publisher].
type Options struct {
	// SchemaAdapter is that of watermill-sql v3, for the tables of the topics. They must exist: nothing is created
	// inside the transaction.
	// Required, unless there is InsertQuery.
	SchemaAdapter watermillsql.SchemaAdapter

	// InsertQuery makes the statement that inserts the messages, at most 1000, and its arguments, for tables of
	// another version of watermill-sql. With v4:
	//
	//	func(topic string, messages message.Messages) (string, []any, error) {
	//		query, err := schema.InsertQuery(watermillsql.InsertQueryParams{Topic: topic, Msgs: messages})
	//		return query.Query, query.Args, err
	//	}
	//
	// Required, unless there is SchemaAdapter.
	InsertQuery func(topic string, messages message.Messages) (query string, args []any, err error)

	// Logger is given to watermill-sql.
	// Default: watermill.NopLogger.
	Logger watermill.LoggerAdapter
}

// Publisher is a message.Publisher that inserts into an outbox table through the transaction in which the inbox has
// claimed the message being handled.
//
// It finds the transaction in each message's context. cqrs.EventBus and cqrs.CommandBus put the handler's
// context there; elsewhere call msg.SetContext with it, or use it as [inbox.Options].Outbox for what
// the handler returns. The deadline of the first message's context bounds the statement.
//
// It holds nothing and may be used by many goroutines, as far as each transaction is used by one.
type Publisher struct {
	options Options
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher returns a publisher. It needs no server.
func NewPublisher(options Options) (*Publisher, error) {
	switch {
	case options.SchemaAdapter == nil && options.InsertQuery == nil:
		return nil, errors.New("outbox: SchemaAdapter and InsertQuery are nil")
	case options.SchemaAdapter != nil && options.InsertQuery != nil:
		return nil, errors.New("outbox: SchemaAdapter and InsertQuery are both set, want one")
	case options.InsertQuery != nil:
		options.SchemaAdapter = insertOnly{insert: options.InsertQuery}
	}
	if options.Logger == nil {
		options.Logger = watermill.NopLogger{}
	}
	return &Publisher{options: options}, nil
}

// Publish inserts the messages into the topic's table. It returns [ErrNoTransaction], [ErrMixedTransactions]
// or the database's error, after which PostgreSQL commits nothing of the transaction.
func (p *Publisher) Publish(topic string, messages ...*message.Message) error {
	if len(messages) == 0 {
		return nil
	}
	tx, err := transactionOf(messages)
	if err != nil {
		return inbox.Permanent(fmt.Errorf("cannot publish to topic %q: %w", topic, err))
	}
	publisher, err := watermillsql.NewPublisher(
		executor{tx: tx, ctx: messages[0].Context()},
		watermillsql.PublisherConfig{SchemaAdapter: p.options.SchemaAdapter},
		p.options.Logger,
	)
	if err != nil {
		return err
	}
	for batch := range slices.Chunk(messages, maxBatch) {
		if err := publisher.Publish(topic, batch...); err != nil {
			return fmt.Errorf("cannot publish to topic %q in the handler's transaction: %w", topic, err)
		}
	}
	return nil
}

// Close does nothing: the transactions are the inbox's.
func (p *Publisher) Close() error { return nil }

// transaction is what a transaction of the inbox must be able to do: a handler's statement with the placeholders of
// its driver. Inboxsql's and inboxpgx's can.
type transaction interface {
	inbox.Transaction
	Exec(ctx context.Context, statement string, args ...any) (affected int64, err error)
}

func transactionOf(messages []*message.Message) (transaction, error) {
	var common transaction
	for _, msg := range messages {
		tx, ok := inbox.TransactionFromContext[transaction](msg.Context())
		switch {
		case !ok:
			return nil, fmt.Errorf("message %s: %w", msg.UUID, ErrNoTransaction)
		case common != nil && tx != common:
			return nil, fmt.Errorf("message %s: %w", msg.UUID, ErrMixedTransactions)
		}
		common = tx
	}
	return common, nil
}

// executor runs watermill-sql's INSERT in the transaction, under the message's context: watermill-sql's Publish has no
// context and uses the background one. It does nothing else, and Publish asks for nothing else.
type executor struct {
	watermillsql.ContextExecutor // nil
	tx                           transaction
	ctx                          context.Context
}

func (e executor) ExecContext(_ context.Context, query string, args ...any) (sql.Result, error) {
	affected, err := e.tx.Exec(e.ctx, query, args...)
	return driver.RowsAffected(affected), err
}

// insertOnly is a schema adapter as far as Publish uses one.
type insertOnly struct {
	watermillsql.SchemaAdapter // nil
	insert                     func(string, message.Messages) (string, []any, error)
}

func (i insertOnly) InsertQuery(topic string, messages message.Messages) (watermillsql.Query, error) {
	query, args, err := i.insert(topic, messages)
	return watermillsql.Query{Query: query, Args: args}, err
}
