package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v3/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
)

// Errors of [Publisher.Publish], before any SQL is sent.
var (
	// ErrNoTransaction: a message's context has no open transaction of the inbox: it was not set, or the
	// handler has returned. The publisher never falls back to the pool.
	ErrNoTransaction = errors.New("inboxsql: no open transaction of the inbox in the message's context")

	// ErrMixedTransactions: the messages of one call have different transactions.
	ErrMixedTransactions = errors.New("inboxsql: the messages have different transactions")
)

// publishBatch keeps a statement below PostgreSQL's limit of 65535 parameters, of which watermill-sql
// takes three for a message.
const publishBatch = 1000

// PublisherOptions of a [Publisher].
type PublisherOptions struct {
	// SchemaAdapter is watermill-sql's, for the tables of the topics. They must exist: nothing is created
	// inside of the transaction.
	// Required.
	SchemaAdapter watermillsql.SchemaAdapter

	// Logger is given to watermill-sql.
	// Default: watermill.NopLogger.
	Logger watermill.LoggerAdapter
}

// Publisher is the outbox: a message.Publisher that writes with watermill-sql through the transaction in
// which the inbox has claimed the message being handled. What it publishes is in the table if, and only
// if, the handler's work and the claim are committed. A subscriber of watermill-sql, or Watermill's
// forwarder, takes it from there to a broker.
//
// It finds the transaction in each message's context. cqrs.EventBus and cqrs.CommandBus put the handler's
// context there; elsewhere call msg.SetContext with it, or use it as [inbox.Options].Outbox for what
// the handler returns. The deadline of the first message's context bounds the statement.
//
// It holds nothing and may be used by many goroutines, as far as each transaction is used by one.
type Publisher struct {
	options PublisherOptions
}

var _ message.Publisher = (*Publisher)(nil)

// NewPublisher returns a publisher. It needs no server.
func NewPublisher(options PublisherOptions) (*Publisher, error) {
	if options.SchemaAdapter == nil {
		return nil, errors.New("inboxsql: SchemaAdapter is nil")
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
		return fmt.Errorf("cannot publish to topic %q: %w", topic, err)
	}
	publisher, err := watermillsql.NewPublisher(
		boundExecutor{Tx: tx, ctx: messages[0].Context()},
		watermillsql.PublisherConfig{SchemaAdapter: p.options.SchemaAdapter},
		p.options.Logger,
	)
	if err != nil {
		return err
	}
	for batch := range slices.Chunk(messages, publishBatch) {
		if err := publisher.Publish(topic, batch...); err != nil {
			return fmt.Errorf("cannot publish to topic %q in the handler's transaction: %w", topic, err)
		}
	}
	return nil
}

// Close does nothing: the transactions are the inbox's.
func (p *Publisher) Close() error { return nil }

func transactionOf(messages []*message.Message) (*sql.Tx, error) {
	var common *sql.Tx
	for _, msg := range messages {
		tx, ok := TxFromContext(msg.Context())
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

// boundExecutor runs statements under the message's context: watermill-sql's Publish has no context and
// uses the background one.
type boundExecutor struct {
	*sql.Tx
	ctx context.Context
}

func (e boundExecutor) ExecContext(_ context.Context, query string, args ...any) (sql.Result, error) {
	return e.Tx.ExecContext(e.ctx, query, args...)
}
