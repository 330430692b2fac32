package inboxtest

import (
	"context"
	"math"
	"slices"
	"time"

	inbox "github.com/devmappa/watermill-inbox"
)

// Consumers implements [inbox.Records].
func (r *MemoryRepository) Consumers(ctx context.Context) (consumers []string, now time.Time, err error) {
	err = r.locked(ctx, func() {
		for key := range r.records {
			consumers = append(consumers, key.Consumer)
		}
		for _, unsent := range r.unsent {
			consumers = append(consumers, unsent.Key.Consumer)
		}
	})
	slices.Sort(consumers)
	return slices.Compact(consumers), time.Now(), err
}

// DeleteProcessed implements [inbox.Records]. It is over before another call begins.
func (r *MemoryRepository) DeleteProcessed(ctx context.Context, params inbox.DeleteProcessedParams) (deleted int, last time.Time, err error) {
	late := false
	err = r.locked(ctx, func() {
		began := time.Now()
		var expired []inbox.Key
		for key, at := range r.records {
			if at.Before(params.Before) && selected(inbox.Selection{Consumer: params.Consumer, From: params.From}, key, at) {
				expired = append(expired, key)
			}
		}
		slices.SortFunc(expired, func(a, b inbox.Key) int { return r.records[a].Compare(r.records[b]) })
		if late = params.Timeout > 0 && time.Since(began) >= params.Timeout; late {
			return
		}
		for _, key := range expired[:min(max(params.Limit, 0), len(expired))] {
			last = r.records[key]
			delete(r.records, key)
			deleted++
		}
	})
	if late {
		err = inbox.ErrBatchTimeout
	}
	return deleted, last, err
}

// CountRecords implements [inbox.Records].
func (r *MemoryRepository) CountRecords(ctx context.Context, selection inbox.Selection) (int, error) {
	found, err := r.FindRecords(ctx, selection, inbox.Record{}, math.MaxInt)
	return len(found), err
}

// FindRecords implements [inbox.Records].
func (r *MemoryRepository) FindRecords(ctx context.Context, selection inbox.Selection, after inbox.Record, limit int) (found []inbox.Record, err error) {
	err = r.locked(ctx, func() {
		if selection.Unsent {
			for _, unsent := range r.page(selection, after, limit, func(*memoryUnsent) bool { return true }) {
				found = append(found, unsent.Record)
			}
			return
		}
		for key, at := range r.records {
			if selected(selection, key, at) && key.Compare(after.Key) > 0 {
				found = append(found, *r.record(key))
			}
		}
	})
	slices.SortFunc(found, inbox.Record.Compare)
	return found[:min(limit, len(found))], err
}

// LeaseUnsent implements [inbox.Records].
func (r *MemoryRepository) LeaseUnsent(ctx context.Context, selection inbox.Selection, after inbox.Record, limit int, lease time.Duration) (leased []inbox.Record, err error) {
	err = r.locked(ctx, func() {
		now := time.Now()
		for _, unsent := range r.page(selection, after, limit, func(u *memoryUnsent) bool { return !now.Before(u.leasedUntil) }) {
			unsent.leasedUntil = now.Add(lease)
			leased = append(leased, unsent.Record)
		}
	})
	return leased, err
}

// page returns at most limit unsent messages, in order. The mutex is held.
func (r *MemoryRepository) page(selection inbox.Selection, after inbox.Record, limit int, also func(*memoryUnsent) bool) (page []*memoryUnsent) {
	for _, unsent := range r.unsent {
		if len(page) < limit && selected(selection, unsent.Key, unsent.storedAt) && unsent.Compare(after) > 0 && also(unsent) {
			page = append(page, unsent)
		}
	}
	return page
}

// DeleteRecords implements [inbox.Records].
func (r *MemoryRepository) DeleteRecords(ctx context.Context, found []inbox.Record) (deleted int, err error) {
	if _, err := r.DeleteUnsent(ctx, found); err != nil {
		return 0, err
	}
	err = r.locked(ctx, func() {
		for _, record := range found {
			if at, ok := r.records[record.Key]; ok && at.Equal(record.ProcessedAt) {
				delete(r.records, record.Key)
				deleted++
			}
		}
	})
	return deleted, err
}

// DeleteUnsent implements [inbox.Records].
func (r *MemoryRepository) DeleteUnsent(ctx context.Context, found []inbox.Record) (deleted int, err error) {
	err = r.locked(ctx, func() {
		before := len(r.unsent)
		r.unsent = slices.DeleteFunc(r.unsent, func(unsent *memoryUnsent) bool {
			return slices.ContainsFunc(found, func(record inbox.Record) bool { return unsent.Compare(record) == 0 })
		})
		deleted = before - len(r.unsent)
	})
	return deleted, err
}

// Statistics implements [inbox.Records].
func (r *MemoryRepository) Statistics(ctx context.Context, consumers inbox.Consumers) (statistics inbox.Statistics, err error) {
	names, now, err := r.Consumers(ctx)
	if err != nil {
		return inbox.Statistics{}, err
	}
	for _, name := range names {
		if !consumers.Contains(name) {
			continue
		}
		s := inbox.ConsumerStatistics{Consumer: name}
		err := r.locked(ctx, func() {
			for key, at := range r.records {
				if key.Consumer != name {
					continue
				}
				s.Records++
				if now.Sub(at) < 24*time.Hour {
					s.LastDay++
				}
				if s.Oldest.IsZero() || at.Before(s.Oldest) {
					s.Oldest = at
				}
				if at.After(s.Newest) {
					s.Newest = at
				}
			}
			s.Unsent = int64(len(r.page(inbox.Selection{Consumer: name}, inbox.Record{}, math.MaxInt, func(*memoryUnsent) bool { return true })))
		})
		if err != nil {
			return inbox.Statistics{}, err
		}
		statistics.Consumers = append(statistics.Consumers, s)
	}
	return statistics, nil
}

func (r *MemoryRepository) locked(ctx context.Context, do func()) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	r.mutex.Lock()
	defer r.mutex.Unlock()
	do()
	return nil
}

func selected(s inbox.Selection, key inbox.Key, at time.Time) bool {
	age := time.Since(at)
	return (s.Consumer == "" || key.Consumer == s.Consumer) &&
		(s.MessageID == "" || key.MessageID == s.MessageID) &&
		(s.From.IsZero() || !at.Before(s.From)) &&
		(s.To.IsZero() || at.Before(s.To)) &&
		(s.OlderThan == 0 || age > s.OlderThan) &&
		(s.NotOlderThan == 0 || age <= s.NotOlderThan)
}
